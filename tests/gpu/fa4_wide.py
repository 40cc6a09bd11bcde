"""Checks the compiled kernels for head dims beyond 256, and measures them.

usage: python tests/gpu/fa4_wide.py [--out FOLDER]

The library is that of ATTN_DISPATCH_FA4_LIBRARY, or else where build-fa4 puts it. Results are
filled with NaN before every call. Head dims from 272 to 512 run forward and backward, with a
gradient of lse, in both dtypes: shared heads; full calls, and causal ones from both corners, with
fewer, as many and more queries than keys. Their references are formulas in float64. Backward passes
run three times, and must give the same bits. Then three calls are measured beside XLA and cuDNN.
The exit status is 1 if an error exceeds what is allowed.
"""

from __future__ import annotations

import os

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attn_dispatch import dot_product_attention, fallback
from attn_dispatch.fa4 import compiled
from tests.gpu import kernel_report
from tests.gpu.kernel_report import Row, measured, relative_error, row
from tests.support import attention_in_numpy as attention

_HEAD_DIMS = (272, 300, 320, 384, 448, 512)
_HEADS = ((4, 4), (8, 4), (8, 1))
_LENGTHS = ((200, 330), (260, 260), (330, 200))
_MODES = ("full", "bottom_right", "top_left")
_ALLOWED = {"bfloat16": 1.5e-2, "float16": 2.5e-3}
"""The largest error by dtype, as a share of the largest number of a reference."""
_ALLOWED_LSE = 1e-4
_NAMES = ("out", "lse", "dq", "dk", "dv")
_TIMED = (
    (512, 8, 4, 8192, True),
    (512, 8, 4, 8192, False),
    (320, 16, 16, 4096, False),
)


@dataclass(frozen=True)
class Call:
    """A call of two batch rows."""

    head_dim: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    mode: str
    dtype: str

    def __str__(self) -> str:
        (n, k), (t, s) = self.heads, self.lengths
        return f"d{self.head_dim} {n}/{k} {t}x{s} {self.mode} {self.dtype}"

    def arrays(self) -> tuple[jax.Array, ...]:
        """query, key, value, and the gradients of out and lse."""
        (n, k), (t, s), h = self.heads, self.lengths, self.head_dim
        keys = jax.random.split(jax.random.key(0), 5)
        shapes = [(2, t, n, h), (2, s, k, h), (2, s, k, h), (2, t, n, h)]
        drawn = [
            jax.random.normal(x, y).astype(self.dtype)
            for x, y in zip(keys[:4], shapes, strict=True)
        ]
        return *drawn, jax.random.normal(keys[4], (2, t, n))

    def attention(self, q, k, v):
        causality: dict[str, Any] = {}
        if self.mode != "full":
            causality = {"is_causal": True, "causal_alignment": self.mode}
        return dot_product_attention(
            q, k, v, **causality, return_lse=True, deterministic_backward=True, implementation="fa4"
        )

    def results(self, q, k, v, out_grad, lse_grad):
        found, transposed = jax.vjp(self.attention, q, k, v)
        return (*found, *transposed((out_grad, lse_grad)))

    def visible(self) -> np.ndarray:
        """bool [T, S]."""
        t, s = self.lengths
        offset = {"full": s, "bottom_right": s - t, "top_left": 0}[self.mode]
        return np.arange(s) <= np.arange(t)[:, None] + offset

    def reference(self, q, k, v, out_grad, lse_grad) -> tuple[np.ndarray, ...]:
        """The same results, in float64."""
        q, k, v, out_grad, lse_grad = (
            np.asarray(x, np.float64) for x in (q, k, v, out_grad, lse_grad)
        )
        scale = self.head_dim**-0.5
        scores = np.where(self.visible(), scale * attention.across(q, k), -np.inf)
        weights, lse = attention.softmax(scores)
        out = attention.applied(weights, v)
        products = np.einsum("btnh,btnh->bnt", out, out_grad) - lse_grad.swapaxes(1, 2)
        score_grad = weights * (attention.across(out_grad, v) - products[..., None]) * scale
        gradients = attention.gradients(q, k, weights, score_grad, out_grad)
        return out, lse.swapaxes(1, 2), *gradients


def calls(widest: dict[str, int]) -> list[Call]:
    """Every call that compiled kernels hold, by the widest of each dtype. From the top left, a call
    has fewer queries than keys, as others are refused or are those from the bottom right."""
    drawn = itertools.product(_HEAD_DIMS, _HEADS, _LENGTHS, _MODES, widest)
    return [
        Call(h, heads, lengths, mode, dtype)
        for h, heads, lengths, mode, dtype in drawn
        if h <= widest[dtype] and (mode != "top_left" or lengths[0] < lengths[1])
    ]


def checks(call: Call) -> Iterator[Row]:
    """The errors of a call, as kernel_report has them."""
    arrays = call.arrays()
    program = jax.jit(call.results)
    got = [np.asarray(x, np.float64) for x in program(*arrays)]
    for name, x, exact in zip(_NAMES, got, call.reference(*arrays), strict=True):
        allowed = _ALLOWED_LSE if name == "lse" else _ALLOWED[call.dtype]
        yield row(str(call), name, relative_error(x, exact), allowed)
    again = [[np.asarray(x, np.float64) for x in program(*arrays)] for _ in range(2)]
    changes = sum(not np.array_equal(x, y) for z in again for x, y in zip(got, z, strict=True))
    yield row(str(call), "changed results", changes, 0)


def times() -> dict[str, dict[str, float]]:
    """Microseconds of a forward pass, and of it with the backward pass."""
    found = {}
    for h, n, k, length, is_causal in _TIMED:
        shapes = [(1, length, x, h) for x in (n, k, k, n)]
        keys = jax.random.split(jax.random.key(0), 4)
        arrays = [jax.random.normal(x, y, jnp.bfloat16) for x, y in zip(keys, shapes, strict=True)]

        def attention(q, k, v, name, is_causal=is_causal):
            return dot_product_attention(q, k, v, is_causal=is_causal, implementation=name)

        def both(q, k, v, out_grad, name, attention=attention):
            out, transposed = jax.vjp(partial(attention, name=name), q, k, v)
            return out, *transposed(out_grad)

        case = f"d{h} {n}/{k} S{length} {'causal' if is_causal else 'full'}"
        for which, function, count, names in (
            ("forward", attention, 3, ("fa4", "xla", "cudnn")),
            ("forward and backward", both, 4, ("fa4", "xla")),
        ):
            given = arrays[:count]
            programs = {
                x: jax.jit(partial(function, name=x)).lower(*given).compile() for x in names
            }
            found[f"{case} {which}"] = measured(
                {x: partial(y, *given) for x, y in programs.items()}
            )
            print(case, which, {x: round(y) for x, y in found[f"{case} {which}"].items()})
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    library, start = compiled.find(), time.perf_counter()
    if not library.is_usable:
        sys.exit(library.unusable_reason)
    sets = [x for x in library.sets if x.is_wide]
    widest = {x: max((y.head_dim for y in sets if y.dtype == x), default=0) for x in _ALLOWED}
    rows: list[Row] = []
    with fallback("silent"), ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda x: list(checks(x)), calls(widest)):
            rows += found
            for wrong in (x for x in found if not x["right"]):
                print("WRONG", wrong, flush=True)
    for result, dtype in itertools.product(dict.fromkeys(x["result"] for x in rows), _ALLOWED):
        of_both = (x for x in rows if x["result"] == result and x["case"].endswith(dtype))
        worst = max((x["error"] for x in of_both), default=0)
        print(f"{result} {dtype}: worst error {worst:.2e}", flush=True)
    print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
    os.environ["ATTN_DISPATCH_POISON"] = ""
    found = times() if any(x.name == "sm90_d512_bfloat16" for x in sets) else {}
    wrong = sum(not x["right"] for x in rows)
    print(f"{len(rows)} checks, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    if options.out:
        kernel_report.write(options.out, "fa4_wide", library.versions, rows, found)
    return int(wrong > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
