"""Train a small diffusion transformer by MeanFlow.

Run from the repository root: python -m examples.mean_flow --help
"""

import argparse
import dataclasses
import statistics

import jax

from attn_dispatch import dot_product_attention
from attn_dispatch_tools.terminal.ending import run_process

from .. import options
from .model import Attention, Config
from .training import train

SIZES = {
    "tiny": (Config(tokens=32, channels=4, width=64, heads=2, layers=2, dtype="float32"), 16),
    "base": (Config(tokens=1024, channels=16, width=1024, heads=8, layers=12), 16),
}
"""A model, and the batch of a step. The base size fits one GPU of 80 GB, with either attention."""

ATTENTION: dict[str, Attention] = {
    "attn_dispatch": dot_product_attention,
    "jax.nn": jax.nn.dot_product_attention,
}


def main(arguments: list[str] | None = None) -> list[float]:
    args = _parse(arguments)
    config, batch = SIZES[args.size]
    config = dataclasses.replace(config, tokens=args.tokens or config.tokens)
    batch = args.batch or batch
    print(
        f"{args.size}: {config.layers} layers of {config.width}, {config.heads} heads, "
        f"{batch} x {config.tokens} tokens, {config.dtype}; attention by {args.attention}; "
        f"{jax.devices()[0].device_kind}"
    )
    losses: list[float] = []
    run = train(
        config, batch, ATTENTION[args.attention], steps=args.steps, rate=args.rate, seed=args.seed
    )
    shown = 0
    for number, (value, speed) in enumerate(run, 1):
        losses.append(value)
        if number % max(args.steps // 10, 1) == 0 or number == args.steps:
            # The loss of one batch varies more than ten steps lower it.
            mean = statistics.fmean(losses[shown:])
            print(f"steps to {number}: mean loss {mean:.4f}, {speed:.2f} steps/s", flush=True)
            shown = number
    return losses


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.mean_flow", description=__doc__)
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument(
        "--size", choices=SIZES, default="base" if on_gpu else "tiny",
        help="default: base on a GPU, tiny elsewhere",
    )  # fmt: skip
    parser.add_argument(
        "--attention", choices=ATTENTION, default="attn_dispatch",
        help="whose dot_product_attention; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--tokens", type=options.POSITIVE, metavar="N", help="default: the size's")
    parser.add_argument("--batch", type=options.POSITIVE, metavar="N", help="default: the size's")
    parser.add_argument(
        "--steps", type=options.POSITIVE, default=50, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--rate", type=options.FINITE, default=1e-3, help="Adam's; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=options.SEED, default=0, metavar="N", help="default: %(default)s"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_process(main)
