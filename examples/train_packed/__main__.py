"""Train a decoder on packed documents.

Run from the repository root: python -m examples.train_packed --help
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax

from attn_dispatch.text import error_text
from attn_dispatch_tools.terminal.ending import run_process

from .. import options
from ..screen import console
from . import checkpoint
from .mesh import make_mesh
from .model import REMAT
from .report import attention, report, trained
from .sizes import SIZES, Size
from .training import LAYOUTS, Task


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    size = _size(args)
    options.make_folder("--out", args.out)
    options.make_folder("--checkpoints", args.checkpoints)
    if args.resume and checkpoint.latest(args.checkpoints) is None:
        console.print(f"no checkpoint in {args.checkpoints}: training from the start")
    try:
        task = Task(
            size, make_mesh(*args.mesh, context=args.context), args.layout, args.seed,
            args.checkpoints, args.every,
        )  # fmt: skip
        c, count = size.config, len(jax.devices())
        console.print(
            f"{args.size}: {c.layers} layers of {c.width}, {c.heads} query heads over "
            f"{c.kv_heads}, {c.dtype}, rows of {size.shape.row_length} bytes; "
            f"{args.mesh[0]} x {args.context} x {args.mesh[1]} of {count} "
            f"{jax.devices()[0].device_kind}"
        )
        console.print(f"attention, forward and backward: {attention(task)}")
        layouts = LAYOUTS if args.compare else (args.layout,)
        tasks = {x: dataclasses.replace(task, layout=x) for x in layouts}
        runs = {layout: attention(x) for layout, x in tasks.items()}
        done = {layout: trained(x, args.resume) for layout, x in tasks.items()}
    except BrokenPipeError:
        raise  # the reader of the output, such as head, has left
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error_text(error)}")
    facts = {
        "size": dataclasses.asdict(size), "mesh": args.mesh, "context": args.context,
        "attention": runs,
    }  # fmt: skip
    return report(done, facts, args.out)


def _size(args: argparse.Namespace) -> Size:
    size = SIZES[args.size]
    config = dataclasses.replace(
        size.config, remat=args.remat, dtype=args.dtype or size.config.dtype
    )
    return dataclasses.replace(size, config=config, steps=args.steps or size.steps)


def _mesh(text: str) -> tuple[int, int]:
    data, _, model = text.partition("x")
    if not (data.isdecimal() and model.isdecimal() and int(data) * int(model)):
        raise argparse.ArgumentTypeError(f"expected two ints above 0 like 4x2, got {text}")
    return int(data), int(model)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_packed", description=__doc__)
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument(
        "--size", choices=SIZES, default="large" if on_gpu else "small",
        help="default: large on a GPU, small elsewhere",
    )  # fmt: skip
    parser.add_argument("--steps", type=options.POSITIVE, metavar="N", help="default: the size's")
    parser.add_argument(
        "--compare", action="store_true", help="train packed, then padded, on the same documents"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="packed")
    parser.add_argument(
        "--mesh", type=_mesh, default=(1, 1), metavar="DATAxMODEL", help="devices; default: 1x1"
    )
    parser.add_argument(
        "--context", type=options.POSITIVE, default=1, metavar="N",
        help="devices for the tokens of a row, beside those of --mesh; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--remat", choices=REMAT, default="context",
        help="what a layer keeps for its backward pass: everything (none), the attention "
        "(context), or that and the matrix products (dots); default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of activations")
    parser.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="save the state there at the end"
    )
    parser.add_argument(
        "--every", type=options.NUMBER, default=0, metavar="N", help="also save it every N steps"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint")
    parser.add_argument(
        "--seed", type=options.SEED, default=0, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/train_packed"), metavar="FOLDER",
        help="write the plot and the numbers there; default: %(default)s",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    if args.compare and args.checkpoints:
        parser.error("--compare makes two runs: it takes no --checkpoints")
    if args.every and not args.checkpoints:
        parser.error("--every needs --checkpoints")
    if args.resume and not args.checkpoints:
        parser.error("--resume needs --checkpoints")
    return args


if __name__ == "__main__":
    run_process(main)
