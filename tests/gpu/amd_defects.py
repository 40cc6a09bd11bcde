"""Calls that would show known defects of AITER's ASM kernels, many times over, on an AMD GPU.

    python -m tests.gpu.amd_defects --out defects.json

docs/aiter_defects.md describes the defects, which an interpreter of machine code has found. Each
call runs on the kernel in question, also where this package avoids it, and is compared with XLA in
float32 and with its own first results. Another process meanwhile keeps the GPU busy. Send back the
file. Without an AMD GPU, XLA runs the calls, which tries the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # there are two processes

import jax
import jax.numpy as jnp
import numpy as np

import attn_dispatch
from attn_dispatch.aiter import asm_rules, folder

AVOIDED = ("aiter/asm_192_barrier",)
"""Rules that keep a call from the kernel in question."""
NAMES = ("out", "lse", "dq", "dk", "dv")
_MOST_ERROR = 2**-5
"""The allowed error as a share of the largest number of a result."""
_FROM_ATOMICS = ("dq",)  # two right runs differ in their last bits
_CAUSAL = {"is_causal": True}


@dataclass(frozen=True)
class Call:
    """A self-attention call, and the kernels that it is meant for."""

    name: str
    archs: tuple[str, ...]
    length: int
    head_dims: tuple[int, int] = (128, 128)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    batch: int = 4
    heads: int = 32

    def arrays(self) -> tuple[jax.Array, ...]:
        """query, key, value and the gradient of the output."""
        wide, narrow = self.head_dims
        keys = jax.random.split(jax.random.key(0), 4)
        shape = (self.batch, self.length, self.heads)
        return tuple(
            jax.random.normal(key, (*shape, dim), jnp.bfloat16)
            for key, dim in zip(keys, (wide, wide, narrow, narrow), strict=True)
        )


CALLS = (
    Call("dq_convert: s_waitcnt", ("gfx942",), 1024),
    Call("dq_convert: s_waitcnt, head dim 64", ("gfx942",), 1024, (64, 64)),
    Call("dq_convert: s_waitcnt, short", ("gfx942",), 32),
    Call("192/128 forward: s_barrier", ("gfx950",), 160, (192, 128)),
    Call("192/128 forward: s_barrier, causal", ("gfx950",), 600, (192, 128), _CAUSAL),
    Call("causal forward and backward: s_barrier", ("gfx950",), 600, options=_CAUSAL),
    Call(
        "causal forward and backward: s_barrier, long", ("gfx950",), 4096, options=_CAUSAL, batch=1
    ),
)
SMALL = tuple(replace(x, batch=1, heads=2, length=min(x.length, 160)) for x in CALLS)
"""What a CPU runs in seconds."""


@contextlib.contextmanager
def kernels_in_question() -> Iterator[None]:
    """Let calls run on kernels that this package otherwise avoids."""
    kept = tuple(x for x in asm_rules.ASM_RULES if x.name not in AVOIDED)
    with (
        mock.patch.object(asm_rules, "ASM_RULES", kept),
        mock.patch.object(asm_rules, "DOUBTS", ()),
        mock.patch.object(asm_rules, "DQ_IS_STORED_EARLY", ()),
    ):
        yield


def program(call: Call, implementation: str | None) -> Any:
    """The jitted function of `call.arrays()` that returns NAMES."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attn_dispatch.dot_product_attention(
            q, k, v, return_lse=True, implementation=implementation, **call.options
        )

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
        out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return out, lse, *pull(grad)

    return run


@jax.jit
def _differences(got: Any, first: Any, expected: Any) -> tuple[list[Any], list[Any]]:
    """The error of each result as a share of its largest number, and whether it has changed."""
    errors, changed = [], []
    for x, y, z in zip(got, first, expected, strict=True):
        error = jnp.abs(x.astype(jnp.float32) - z).max() / jnp.abs(z).max()
        errors.append(jnp.where(jnp.isfinite(x).all(), error, jnp.inf))
        changed.append((x != y).any())
    return errors, changed


def measure(call: Call, implementation: str | None, seconds: float, most: int) -> dict[str, Any]:
    """Run a call over and over, and count what is wrong and what changes from run to run."""
    arrays = call.arrays()
    expected = program(call, "xla")(*(x.astype(jnp.float32) for x in arrays))
    with kernels_in_question():
        told = attn_dispatch.explain(
            *arrays[:3], return_lse=True, implementation=implementation, **call.options
        )
        run = program(call, implementation).lower(*arrays).compile()
    first = run(*arrays)
    largest = dict.fromkeys(NAMES, 0.0)
    wrong, changed = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    runs, end = 0, time.monotonic() + seconds
    while runs < most and (runs == 0 or time.monotonic() < end):
        errors, differs = jax.device_get(_differences(run(*arrays), first, expected))
        runs += 1
        for name, error, differ in zip(NAMES, errors, differs, strict=True):
            largest[name] = max(largest[name], float(error))
            wrong[name] += int(error > _MOST_ERROR)
            changed[name] += int(differ) * (name not in _FROM_ATOMICS)
    return {
        "name": call.name, "explain": str(told), "runs": runs, "wrong": wrong, "changed": changed,
        "largest_error": {x: y if math.isfinite(y) else "not finite" for x, y in largest.items()},
    }  # fmt: skip


@contextlib.contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """Another process that keeps the device's compute units, LDS and memory busy."""
    if not wanted:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-m", "tests.gpu.amd_defects", "--as-neighbour"])
    try:
        yield
    finally:
        busy.terminate()
        busy.wait(timeout=60)


def stress(seconds: float) -> None:
    """Products of matrices and sorts, until the time is over."""
    x = jax.random.normal(jax.random.key(1), (4096, 4096), jnp.bfloat16)
    step = jax.jit(lambda x: jnp.sort(x @ x * jnp.bfloat16(0.01), axis=0))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        x = step(x).block_until_ready()


def report(calls: Sequence[Call], implementation: str | None, args: Any) -> dict[str, Any]:
    """The versions, and what each call showed, alone and beside a neighbour."""
    device = jax.devices()[0]
    results = []
    for busy in (False, True) if args.neighbour else (False,):
        with neighbour(busy):
            for call in calls:
                found = measure(call, implementation, args.seconds, args.runs) | {"busy": busy}
                print(f"{call.name}: {found['runs']} runs, wrong {found['wrong']}", flush=True)
                results.append(found)
    return {
        "attn_dispatch": attn_dispatch.__version__, "jax": jax.__version__,
        "numpy": np.__version__, "aiter": folder.version(), "device": device.device_kind,
        "arch": getattr(device, "compute_capability", ""),
        "platform": device.client.platform_version,
        "calls": results,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Look for known defects of AITER's kernels.")
    parser.add_argument("--out", type=Path, default=Path("defects.json"))
    parser.add_argument("--seconds", type=float, default=20, help="for each call (20)")
    parser.add_argument("--runs", type=int, default=10_000, help="at most, of each call (10,000)")
    parser.add_argument(
        "--neighbour", action=argparse.BooleanOptionalAction, default=True,
        help="run all again beside a process that keeps the GPU busy",
    )  # fmt: skip
    parser.add_argument("--as-neighbour", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.as_neighbour:
        stress(3600)
        return
    device = jax.devices()[0]
    arch = str(getattr(device, "compute_capability", "")).partition(":")[0]
    calls = [x for x in CALLS if arch in x.archs]
    if device.platform == "gpu" and not calls:
        raise SystemExit(f"no kernel of {device.device_kind} ({arch or 'unknown'}) is in question")
    if not calls:
        print(
            "no AMD GPU: XLA runs smaller calls on the CPU, which says nothing of AITER's kernels"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = report(calls or SMALL, "aiter" if calls else None, args)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
