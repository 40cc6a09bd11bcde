"""Checks FlashAttention-4's kernel of the forward-mode derivative, and measures it.

usage: python tests/gpu/fa4_tangent.py [--out FOLDER]

The library is that of ATTN_DISPATCH_FA4_LIBRARY, or else where build-fa4 puts it. Results are
filled with NaN before every call. Every set with such a kernel runs full and causal calls in
several shapes: grouped heads, lengths that end within a tile, other numbers of keys than of rows;
through jax.jvp, and one through the gradient of a loss that has a tangent. Their references are
formulas in float32. Then 16 heads on 4, head dim 128, 2 rows of 4,096, are measured beside the same
forward kernel with the tangent by formulas. The exit status is 1 if an error exceeds what is
allowed, or if a call did not run on the kernel.
"""

from __future__ import annotations

import os

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attn_dispatch import dot_product_attention, fallback
from attn_dispatch.core import tangents
from attn_dispatch.core.formulas import OVER_DEVICES
from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import KernelSet
from tests.gpu import kernel_report

# Batch, query rows, keys, query heads, key heads.
_SHAPES = (
    (2, 1000, 1000, 8, 2),
    (1, 777, 1500, 4, 4),
    (2, 512, 512, 8, 1),
    (1, 1030, 260, 6, 6),
    (3, 63, 63, 6, 3),
)
_ALLOWED = {"bfloat16": 1.5e-2, "float16": 2.5e-3}
"""The largest error by dtype, as a share of the largest number of a reference. Kernels round
weights, out and their results to 16 bits."""
_NAMES = ("out", "lse", "out's tangent", "lse's tangent")


def attention(q, k, v, *, is_causal: bool, return_lse: bool = True):
    return dot_product_attention(
        q, k, v, is_causal=is_causal, return_lse=return_lse, implementation=("fa4", "xla")
    )


def reference(q, k, v, *, is_causal: bool):
    """out and lse [B, T, N], in float32 throughout."""
    b, t, n, h = q.shape
    groups = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", groups, k, precision="highest") * h**-0.5
    if is_causal:
        seen = jnp.arange(k.shape[1]) <= jnp.arange(t)[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", jnp.exp(scores - lse[..., None]), v, precision="highest")
    return out.reshape(b, t, n, -1), lse.reshape(b, n, t).swapaxes(1, 2)


def moved(function: Callable[..., Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """out, lse and their tangents."""
    results, tangents_of_results = jax.jvp(function, arrays[:3], arrays[3:])
    return (*results, *tangents_of_results)


def gradients(function: Callable[..., Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of a loss whose goal has the tangent, as in MeanFlow."""

    def loss(x):
        (out, _), (out_moved, _) = jax.jvp(function, x, arrays[3:])
        goal = jax.lax.stop_gradient(out_moved.astype(jnp.float32))
        return ((out.astype(jnp.float32) + 0.5 * goal) ** 2).sum()

    return jax.grad(loss)(arrays[:3])


def drawn(kernels: KernelSet, shape: tuple[int, int, int, int, int]) -> list[jax.Array]:
    b, t, s, n, k = shape
    shapes = [
        (b, t, n, kernels.head_dim),
        (b, s, k, kernels.head_dim),
        (b, s, k, kernels.head_dim_v),
    ]
    keys = jax.random.split(jax.random.key(0), 6)
    return [
        jax.random.normal(x, y).astype(kernels.dtype) for x, y in zip(keys, 2 * shapes, strict=True)
    ]


def checks(kernels: KernelSet) -> Iterator[dict[str, Any]]:
    """The errors of a set's calls, as kernel_report has them."""
    for i, shape in enumerate(_SHAPES):
        for is_causal in (False, True):
            if is_causal and shape[1] != shape[2]:
                continue
            case = f"{kernels.name} {shape} {'causal' if is_causal else 'full'}"
            programs = {"": (moved, _NAMES)}
            if i == 0:
                programs[" gradients"] = (gradients, ("dq", "dk", "dv"))
            for which, (program, names) in programs.items():
                yield from _check(case + which, kernels, shape, program, names, is_causal)


def _check(case, kernels, shape, program, names, is_causal) -> Iterator[dict[str, Any]]:
    arrays = drawn(kernels, shape)
    ours = jax.jit(partial(program, partial(attention, is_causal=is_causal)))
    exact = jax.jit(partial(program, partial(reference, is_causal=is_causal)))
    count = ours.lower(*arrays).as_text().count(f"@{compiled.TANGENT_TARGET}")
    yield _row(case, "kernels", abs(count - 1), 0.0)
    got, expected = ours(*arrays), exact(*(x.astype(jnp.float32) for x in arrays))
    for name, x, y in zip(names, got, expected, strict=True):
        error = float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())
        allowed = 1e-3 if "lse" in name else _ALLOWED[kernels.dtype]
        # The error of a gradient is that of the tangent in it as well.
        yield _row(case, name, error, allowed * (2 if name.startswith("d") else 1))


def _row(case: str, result: str, error: float, allowed: float) -> dict[str, Any]:
    is_right = error <= allowed  # False for NaN
    return {"case": case, "result": result, "error": error, "allowed": allowed, "right": is_right}


def times() -> dict[str, dict[str, float]]:
    """Microseconds of a forward pass, and of it and the tangent by the kernel and by formulas."""
    found = {}
    b, t, n, k, h = 2, 4096, 16, 4, 128
    shapes = 2 * [(b, t, n, h), (b, t, k, h), (b, t, k, h)]
    arrays = [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)]
    for is_causal in (True, False):
        function = partial(attention, is_causal=is_causal)
        programs = {
            "forward": jax.jit(lambda *x, f=function: f(*x[:3])).lower(*arrays).compile(),
            "kernel": jax.jit(partial(moved, function)).lower(*arrays).compile(),
        }
        with mock.patch.object(tangents, "derivative_on", lambda *_: OVER_DEVICES):
            jax.clear_caches()
            programs["formulas"] = jax.jit(partial(moved, function)).lower(*arrays).compile()
        jax.clear_caches()
        name = f"d128 16/4 B2 S4096 {'causal' if is_causal else 'full'}"
        found[name] = measured(programs, arrays)
        share = found[name]["kernel"] / found[name]["formulas"]
        print(name, found[name], f"kernel / formulas {share:.3f}", flush=True)
    return found


def measured(programs: dict[str, Callable[..., Any]], arrays: list[jax.Array]) -> dict[str, float]:
    """Median microseconds of a call, in turns and in alternating order."""

    def seconds(program: Callable[..., Any], calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([program(*arrays) for _ in range(calls)][-1])
        return (time.perf_counter() - start) / calls

    for program in programs.values():
        seconds(program, 3)
    rounds: dict[str, list[float]] = {x: [] for x in programs}
    for i in range(7):
        for x in [*programs][:: 1 if i % 2 == 0 else -1]:
            rounds[x].append(seconds(programs[x], 10))
    return {x: 1e6 * statistics.median(y) for x, y in rounds.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    library, start = compiled.find(), time.perf_counter()
    if not library.is_usable:
        sys.exit(library.unusable_reason)
    rows: list[dict[str, Any]] = []
    with fallback("silent"):
        for kernels in (x for x in library.sets if x.has_tangents):
            for row in checks(kernels):
                rows.append(row)
                if not row["right"]:
                    print("WRONG", row, flush=True)
            print(kernels.name, f"[{time.perf_counter() - start:.0f} s]", flush=True)
        for result in dict.fromkeys(x["result"] for x in rows):
            worst = max(x["error"] for x in rows if x["result"] == result)
            print(f"{result}: worst error {worst:.2e}", flush=True)
        has_timed_set = any(x.name == "sm90_d128_bfloat16" and x.has_tangents for x in library.sets)
        os.environ["ATTN_DISPATCH_POISON"] = ""
        found = times() if has_timed_set else {}
    wrong = sum(not x["right"] for x in rows)
    print(f"{len(rows)} checks, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    if options.out:
        kernel_report.write(options.out, "fa4_tangent", library.versions, rows, found)
    return int(wrong > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
