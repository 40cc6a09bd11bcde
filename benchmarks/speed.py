"""Speed on one GPU, compared with jax.nn's cuDNN attention in the same run.

usage: python benchmarks/speed.py [--rounds N] [--out FOLDER]

A measurement queues calls back to back for about --seconds, so that synchronisation does not count.
The two libraries take turns, so that the GPU's changing clock affects both equally. The ratio of a
cell is the median over the rounds of jax.nn's time over ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from command import arguments, save
from timing import by_turns

import attn_dispatch
from attn_dispatch_tools.reports.environment import environment
from attn_dispatch_tools.verify.cases import SPEED_CASES

SMALL = (1, 128, 8, 64)


def ours(q, k, v, *, is_causal):
    return attn_dispatch.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")


def theirs(q, k, v, *, is_causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")


def programs(attention: Callable, is_causal: bool) -> dict[str, Callable]:
    """The jitted calls by direction, functions of (q, k, v, out_grad)."""

    def forward(q, k, v, out_grad):
        del out_grad
        return attention(q, k, v, is_causal=is_causal)

    def both(q, k, v, out_grad):
        out, pull = jax.vjp(lambda *a: attention(*a, is_causal=is_causal), q, k, v)
        return out, *pull(out_grad)

    return {"forward": jax.jit(forward), "forward_backward": jax.jit(both)}


def compare(shape, is_causal: bool, rounds: int, seconds: float) -> dict[str, dict]:
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    mine, other = programs(ours, is_causal), programs(theirs, is_causal)
    results = {}
    for direction in mine:
        pair = {"ours": (mine[direction], arrays), "theirs": (other[direction], arrays)}
        times = by_turns(pair, rounds, seconds)
        ratios = sorted(x / y for x, y in zip(times["theirs"], times["ours"], strict=True))
        results[direction] = {
            "ours_us": 1e6 * statistics.median(times["ours"]),
            "jax_nn_us": 1e6 * statistics.median(times["theirs"]),
            "ratio": statistics.median(ratios),
            "ratio_range": [ratios[0], ratios[-1]],
        }
    return results


def main() -> None:
    args = arguments("Speed compared with jax.nn on cuDNN.", rounds=9, seconds=0.15)
    facts = environment()
    rows = []
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    print(f"{'':20s}{'forward':>28s}{'forward + backward':>32s}")
    print(f"{'':20s}{'TFLOP/s   jax.nn   ratio':>28s}{'TFLOP/s   jax.nn   ratio':>32s}")
    for case in SPEED_CASES:
        result = compare(case.shape, case.is_causal, args.rounds, args.seconds)
        cells = []
        for direction, work in (("forward", 1.0), ("forward_backward", 3.5)):
            row = result[direction]
            row["ours_tflops"], row["jax_nn_tflops"] = (
                work * case.forward_flops / row[key] / 1e6 for key in ("ours_us", "jax_nn_us")
            )
            cells.append(f"{row['ours_tflops']:8.0f}{row['jax_nn_tflops']:9.0f}{row['ratio']:8.3f}")
        shape = jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)
        explanation = attn_dispatch.explain(shape, shape, shape, is_causal=case.is_causal)
        engines = {
            direction: verdicts[0].plan and verdicts[0].plan.engine
            for direction, verdicts in (
                ("forward", explanation.forward),
                ("backward", explanation.backward),
            )
        }
        rows.append({"case": str(case), "shape": case.shape, "engines": engines, **result})
        print(f"{case!s:20s}{cells[0]:>28s}{cells[1]:>32s}", flush=True)
    small = compare(SMALL, False, args.rounds, args.seconds)
    for direction, row in small.items():
        print(
            f"small {SMALL} {direction}: {row['ours_us']:.1f} us, "
            f"jax.nn {row['jax_nn_us']:.1f} us, ratio {row['ratio']:.3f}"
        )
    report = {"environment": facts, "cells": rows, "small_call": small}
    save("speed", report, args.out)


if __name__ == "__main__":
    main()
