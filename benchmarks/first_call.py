"""The time of the first call of a shape, with and without saved plans.

usage: python benchmarks/first_call.py [--shapes N] [--calls NAME ...] [--out FOLDER]

Each row is a new process that makes one kind of call at several shapes, forward with all gradients:
on cuDNN without a folder of plans, with an empty one, and with the one that the process before
filled; the others without a folder. The first shape includes the time of loading libraries, and has
a row of its own.
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

_OURS: dict[str, Any] = {"is_causal": True}
_THEIRS: dict[str, Any] = {"is_causal": True, "implementation": "cudnn"}

_CALLS: dict[str, Any] = {
    "cudnn": partial(dot_product_attention, implementation="cudnn", **_OURS),
    "flash": partial(dot_product_attention, implementation="flash", **_OURS),
    "fa4": partial(dot_product_attention, implementation="fa4", **_OURS),
    "default": partial(dot_product_attention, **_OURS),
    "jax.nn": partial(jax.nn.dot_product_attention, **_THEIRS),
    "bias": partial(dot_product_attention, **_OURS),
    "jax.nn, bias": partial(jax.nn.dot_product_attention, **_THEIRS),
}


def first_call(name: str, length: int) -> dict[str, float]:
    """Milliseconds of the steps from a Python function to its first result."""
    key = jax.random.key(length)
    q, k, v = (jax.random.normal(key, (1, length, n, 128), jnp.bfloat16) for n in (8, 2, 2))

    bias = jax.random.normal(key, (1, 8, length, length), jnp.bfloat16)
    call = partial(_CALLS[name], bias=bias) if "bias" in name else _CALLS[name]

    def step(q: jax.Array, k: jax.Array, v: jax.Array, out_grad: jax.Array):
        out, pull = jax.vjp(call, q, k, v)
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


def one_process(name: str, shapes: int) -> None:
    """Print the first shape's times, and the medians over the others, as JSON."""
    first, *rows = (first_call(name, 1024 + 64 * i) for i in range(shapes + 1))
    medians = {x: statistics.median(row[x] for row in rows) for x in first}
    times = {"first": first, "others": medians}
    print(json.dumps({"environment": environment(), "milliseconds": times}))


def in_new_process(name: str, shapes: int, plans: str) -> dict[str, Any]:
    """What `one_process` prints, with this folder of plans."""
    command = (sys.executable, __file__, "--one-process", name, "--shapes", str(shapes))
    given = os.environ | {"ATTN_DISPATCH_PLANS": plans}
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="The time of the first call of a shape.")
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--calls", nargs="+", choices=_CALLS, default=list(_CALLS))
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    parser.add_argument("--one-process", choices=_CALLS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_process:
        return one_process(args.one_process, args.shapes)
    rows: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.calls:
            kinds = {"no folder": "off"}
            if name == "cudnn":
                kinds |= {"empty folder": folder, "filled folder": folder}
            for kind, plans in kinds.items():
                row = f"{name}, {kind}" if name == "cudnn" else name
                try:
                    answer = in_new_process(name, args.shapes, plans)
                except subprocess.CalledProcessError as error:
                    print(row, f"left out: ended with status {error.returncode}", flush=True)
                    continue
                facts, rows[row] = answer["environment"], answer["milliseconds"]
                for which, times in rows[row].items():
                    print(row, which, {x: round(y) for x, y in times.items()}, flush=True)
    save("first_call", {"environment": facts, "milliseconds": rows}, args.out)


if __name__ == "__main__":
    main()
