"""Train SmolLM2-135M further on Python's manual: the loss before and after, and what it writes.

Run from the repository root: python -m examples.finetune --help
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from attn_dispatch_tools.reports.environment import environment, file_name
from attn_dispatch_tools.terminal.ending import run_process

from .. import options
from ..screen import console
from ..smollm2.generate import generate
from ..smollm2.model import Config, InputError, Params
from ..smollm2.random_weights import SMOLLM2_135M, drawn
from ..train_packed.packing import Shape
from .text import manual
from .training import Settings, finetune, loss_on

CPU = Settings(
    Shape(rows=2, row_length=512, max_segments=8, max_documents=16), "float32", steps=8, evaluated=2
)
GPU = Settings(
    Shape(rows=8, row_length=2048, max_segments=16, max_documents=128), "bfloat16", steps=60,
    evaluated=4,
)  # fmt: skip
PROMPT = 'The "for" statement is used to'


@dataclasses.dataclass(frozen=True)
class Model:
    config: Config
    params: Params
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_id: int


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    settings = GPU if jax.default_backend() == "gpu" else CPU
    settings = dataclasses.replace(
        settings, steps=args.steps or settings.steps, learning_rate=args.learning_rate
    )
    options.make_folder("--out", args.out)
    try:
        model = _random() if args.random else _smollm2()
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    text = manual(model.encode, settings.shape.row_length)
    report: dict[str, Any] = {
        "environment": environment(), "settings": dataclasses.asdict(settings),
        "weights": "random" if args.random else "SmolLM2-135M-Instruct",
    }  # fmt: skip

    def evaluate(params: Params, when: str) -> None:
        """Report the losses and a sample."""
        losses = {
            kind: loss_on(documents, params, model.config, settings)
            for kind, documents in (("trained", text.trained), ("held_out", text.held_out))
        }
        made = generate(
            jax.tree.map(lambda x: x.astype(settings.dtype), params), model.config,
            model.encode(args.prompt), args.tokens, model.end_id,
        )  # fmt: skip
        report[when] = losses | {"sample": model.decode(made.ids)}
        shown = ", ".join(f"{x.replace('_', ' ')} {y:.4f}" for x, y in losses.items())
        console.print(f"[bold]{when}[/]: loss {shown} nats per token")
        console.print(f"{args.prompt}{report[when]['sample']}\n", markup=False)

    with console.status("Scoring the manual and writing a sample"):
        evaluate(model.params, "before")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("compiling", total=settings.steps)
        began, tokens_after_first = 0.0, 0

        def on_step(loss: float, tokens: int) -> None:
            nonlocal began, tokens_after_first
            shown = f"loss {loss:.3f}"
            if began:
                tokens_after_first += tokens
                rate = tokens_after_first / (time.perf_counter() - began)
                report["tokens_per_second"] = rate
                shown += f"  {rate:,.0f} tokens/s"
            else:
                began = time.perf_counter()
            progress.update(bar, advance=1, description=shown)

        params, report["losses"] = finetune(
            text.trained, model.params, model.config, settings, on_step
        )
    evaluate(params, "after")
    if args.out:
        path = args.out / f"{file_name('finetune', report['environment'])}.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        console.print(path)
    return report


def _smollm2() -> Model:
    # Imported here, because random weights need neither gguf nor tokenizers.
    from ..smollm2 import gguf_weights
    from ..smollm2.tokenizer import build_tokenizer

    with console.status("Reading and dequantizing the weights"):
        found = gguf_weights.load(gguf_weights.default_path())
        tokenizer = build_tokenizer(found.vocabulary)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found.weights)
    return Model(
        found.config, params, lambda text: tokenizer.encode(text).ids, tokenizer.decode,
        found.vocabulary.end_id,
    )  # fmt: skip


def _random() -> Model:
    """Random weights of the same shapes, whose tokens are bytes."""
    return Model(
        SMOLLM2_135M, drawn(SMOLLM2_135M, "float32"), lambda text: [*text.encode()],
        lambda ids: bytes(x for x in ids if x < 256).decode(errors="replace"), -1,
    )  # fmt: skip


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.finetune", description=__doc__)
    parser.add_argument(
        "--steps", type=options.POSITIVE, metavar="N", help="default: 8; 60 on a GPU"
    )
    parser.add_argument(
        "--learning-rate", type=options.FINITE, default=5e-5, help="default: %(default)s"
    )
    parser.add_argument("--prompt", default=PROMPT, help="the beginning of the sample")
    parser.add_argument(
        "--tokens", type=options.POSITIVE, default=40, metavar="N",
        help="the length of the sample; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--random", action="store_true", help="use random weights of the same shapes"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write the numbers there as JSON"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_process(main)
