"""The time of the first call of a shape, with and without saved plans.

usage: python benchmarks/first_call.py [--shapes N] [--out FOLDER]

Each row is a new process that calls attention at several shapes, forward with all gradients:
without a folder of plans, with an empty one, and with the one that the process before filled. Our
call (on cuDNN) and `jax.nn.dot_product_attention` with cuDNN take turns. The first shape includes
the time of loading cuDNN, and does not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from command import save

from attn_dispatch import dot_product_attention
from attn_dispatch_tools.reports.environment import environment

_CALLS = {
    "ours": partial(dot_product_attention, is_causal=True, implementation="cudnn"),
    "jax.nn": partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),
}


def first_call(name: str, length: int) -> dict[str, float]:
    """Milliseconds of the steps from a Python function to its first result."""
    key = jax.random.key(length)
    q, k, v = (jax.random.normal(key, (1, length, n, 128), jnp.bfloat16) for n in (8, 2, 2))

    def step(q: jax.Array, k: jax.Array, v: jax.Array, out_grad: jax.Array):
        out, pull = jax.vjp(_CALLS[name], q, k, v)
        return out, pull(out_grad)

    times = [time.perf_counter()]
    traced = jax.jit(step).trace(q, k, v, q)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    jax.block_until_ready(compiled(q, k, v, q))
    times.append(time.perf_counter())
    steps = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    names = ("trace", "lower", "compile", "run")
    return {"total": sum(steps)} | dict(zip(names, steps, strict=True))


def one_process(shapes: int) -> None:
    """Print the medians over the shapes as JSON."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _CALLS}
    for i in range(shapes + 1):
        order = list(_CALLS)[:: 1 if i % 2 else -1]
        for name in order:
            row = first_call(name, 1024 + 64 * i)
            if i:
                found[name].append(row)
    medians = {
        name: {x: statistics.median(row[x] for row in rows) for x in rows[0]}
        for name, rows in found.items()
    }
    print(json.dumps({"environment": environment(), "milliseconds": medians}))


def main() -> None:
    parser = argparse.ArgumentParser(description="The time of the first call of a shape.")
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_process:
        return one_process(args.shapes)
    rows: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, plans in (("no folder", ""), ("empty", folder), ("filled", folder)):
            command = (sys.executable, __file__, "--one-process", "--shapes", str(args.shapes))
            given = os.environ | {"ATTN_DISPATCH_PLANS": plans}
            done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
            answer = json.loads(done.stdout.splitlines()[-1])
            facts, rows[name] = answer["environment"], answer["milliseconds"]
            print(name, {x: {k: round(v) for k, v in y.items()} for x, y in rows[name].items()})
    save("first_call", {"environment": facts, "folder of plans": rows}, args.out)


if __name__ == "__main__":
    main()
