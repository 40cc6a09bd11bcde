"""Checks FlashAttention-4's kernel of the forward-mode derivative, and measures it.

usage: python tests/gpu/fa4_tangent.py [--out FOLDER] [--seconds 100] [--sets GLOB ...]

The library is that of ATTN_DISPATCH_FA4_LIBRARY, or else where build-fa4 puts it. Results are
filled with NaN before every call, and padding of packed calls is NaN. Every set with such a kernel
runs calls with every form of a mask, in several shapes: grouped heads, lengths that end within a
tile, other numbers of keys than of rows; through jax.jvp, some under jax.vmap, and some through the
gradient of a loss that has a tangent. Their references are formulas in NumPy. Then 16 heads on 4,
head dim 128, 2 rows of 4,096, are measured beside the same forward kernel with the tangent by
formulas. The exit status is 1 if an error exceeds what is allowed, or if a call did not run on the
kernel.

XLA's autotuning is off: it would measure every product of the formulas, for minutes. So formulas
take much longer than they would; for their times, set XLA_FLAGS=--xla_gpu_autotune_level=4.
"""

from __future__ import annotations

import os

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attn_dispatch import dot_product_attention, fallback
from attn_dispatch.core import tangents
from attn_dispatch.core.formulas import OVER_DEVICES
from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import KernelSet
from tests.gpu import kernel_report
from tests.gpu.kernel_report import Row, measured, relative_error, row
from tests.support import attention_in_numpy as in_numpy

_ALLOWED = {"bfloat16": 1.5e-2, "float16": 2.5e-3}
"""The largest error by dtype, as a share of the largest number of a reference. Kernels round
weights, out and their results to 16 bits."""
_NAMES = ("out", "lse", "out's tangent", "lse's tangent")


@dataclass(frozen=True)
class Call:
    """A call: its shape, its mask as arguments, and as the pairs that it lets through."""

    name: str
    shape: tuple[int, int, int, int, int]
    """Batch, query rows, keys, query heads, key heads."""
    arguments: Mapping[str, Any]
    seen: np.ndarray
    """bool [1|B, 1|N, T, S]."""
    padding: int = 0
    """The number of last rows and keys, of a packed call, that are in no document."""
    programs: tuple[str, ...] = field(default=("jvp",))


def band(rows: int, keys: int, left: int | None, right: int | None, offset: int = 0) -> np.ndarray:
    """The pairs of a window."""
    distance = np.arange(keys) - np.arange(rows)[:, None] - offset
    seen = np.ones((rows, keys), bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen[None, None]


def documents(lengths: tuple[int, ...], padding: int) -> np.ndarray:
    """Segment ids from 1 on, and 0 in padding."""
    ids = [i + 1 for i, x in enumerate(lengths) for _ in range(x)]
    return np.array([ids + [0] * padding], np.int32)


def packed(name: str, seen: np.ndarray, **arguments: Any) -> Call:
    """A call of documents, which see pairs of themselves alone."""
    ids = documents((300, 5, 411, 200), padding := 84)
    within = (ids[:, None, :, None] == ids[:, None, None]) & (ids > 0)[:, None, :, None]
    given = {"query_segment_ids": ids, "key_value_segment_ids": ids, "max_segments": 4}
    return Call(
        name, (1, 1000, 1000, 8, 2), given | arguments, within & seen, padding,
        ("jvp", "gradients"),
    )  # fmt: skip


def calls() -> Iterator[Call]:
    every = ("jvp", "mapped", "gradients")
    for shape in ((2, 1000, 1000, 8, 2), (1, 777, 1500, 4, 4), (1, 1030, 260, 8, 1)):
        seen = band(*shape[1:3], None, None)
        yield Call("full", shape, {}, seen, programs=every if shape[0] == 2 else ("jvp",))
    causal = {"is_causal": True}
    for shape in ((2, 1000, 1000, 8, 2), (3, 63, 63, 6, 3), (1, 1030, 260, 6, 6)):
        yield Call("causal", shape, causal, band(*shape[1:3], None, 0))
    corner = causal | {"causal_alignment": "bottom_right"}
    for shape in ((1, 777, 1500, 4, 4), (1, 500, 260, 6, 3)):
        t, s = shape[1:3]
        yield Call("causal from the bottom right", shape, corner, band(t, s, None, 0, s - t))
    square = (2, 1000, 1000, 8, 2)
    for name, window in (("causal window", (200, 0)), ("window", (130, 70))):
        seen = band(1000, 1000, *window)
        yield Call(name, square, {"local_window_size": window}, seen, programs=every)
    yield packed("packed", np.bool_(True))
    yield packed("packed causal", band(1000, 1000, None, 0), is_causal=True)
    yield packed("packed window", band(1000, 1000, 50, 20), local_window_size=(50, 20))
    mask = np.random.RandomState(0).rand(2, 8, 1000, 1000) < 0.3
    yield Call("mask", square, {"mask": mask}, mask)


def attention(q, k, v, *, return_lse: bool = True, **arguments: Any):
    return dot_product_attention(
        q, k, v, return_lse=return_lse, implementation=("fa4", "xla"), **arguments
    )


def reference(arrays: Sequence[np.ndarray], seen: np.ndarray) -> tuple[np.ndarray, ...]:
    """out, lse [B, T, N], their tangents, and the gradients of `gradients`, in float64."""
    q, k, v, tq, tk, tv = (x.astype(np.float64) for x in arrays)
    scale, across, applied = q.shape[-1] ** -0.5, in_numpy.across, in_numpy.applied
    weights, lse = in_numpy.softmax(np.where(seen, scale * across(q, k), -np.inf))
    out = applied(weights, v)
    changes = weights * scale * (across(tq, k) + across(q, tk))
    lse_moved = changes.sum(-1).swapaxes(1, 2)
    out_moved = applied(changes, v) + applied(weights, tv) - lse_moved[..., None] * out
    out_grad = 2 * (out + 0.5 * out_moved)
    delta = np.einsum("btnh,btnh->bnt", out, out_grad)[..., None]
    score_grad = weights * (across(out_grad, v) - delta) * scale
    grads = in_numpy.gradients(q, k, weights, score_grad, out_grad)
    return out, lse.swapaxes(1, 2), out_moved, lse_moved, *grads


def moved(function: Callable[..., Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """out, lse and their tangents."""
    results, tangents_of_results = jax.jvp(function, arrays[:3], arrays[3:])
    return (*results, *tangents_of_results)


def moved_twice(function: Callable[..., Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same along two tangents by jax.vmap, of which query and value share theirs."""

    def one(key_tangent):
        return moved(function, *arrays[:4], key_tangent, arrays[5])

    return jax.vmap(one)(jnp.stack([arrays[4], arrays[1]]))


def gradients(function: Callable[..., Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of a loss whose goal has the tangent, as in MeanFlow."""

    def loss(x):
        (out, _), (out_moved, _) = jax.jvp(function, x, arrays[3:])
        goal = jax.lax.stop_gradient(out_moved.astype(jnp.float32))
        return ((out.astype(jnp.float32) + 0.5 * goal) ** 2).sum()

    return jax.grad(loss)(arrays[:3])


_PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "jvp": (moved, _NAMES),
    "mapped": (moved_twice, _NAMES),
    "gradients": (gradients, ("dq", "dk", "dv")),
}


def drawn(kernels: KernelSet, call: Call) -> list[np.ndarray]:
    """query, key and value, and their tangents; 0 in padding."""
    b, t, s, n, k = call.shape
    widths = (kernels.head_dim, kernels.head_dim, kernels.head_dim_v)
    shapes = [(*x, y) for x, y in zip(((b, t, n), (b, s, k), (b, s, k)), widths, strict=True)]
    rng = np.random.RandomState(0)
    arrays = [rng.standard_normal(x).astype(jnp.dtype(kernels.dtype)) for x in 2 * shapes]
    return [_with_padding(x, call, 0) for x in arrays]


def _with_padding(x: np.ndarray, call: Call, number: float) -> np.ndarray:
    x = x.copy()
    x[:, x.shape[1] - call.padding :] = number
    return x


def compiled_for(
    program: Callable[..., Any], function: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, jax.Array]]:
    """The jitted program of a call's arrays, and those of its arguments that are arrays: they are
    no constants, which XLA would compute with for minutes."""
    given = {x: jnp.asarray(y) for x, y in arguments.items() if isinstance(y, np.ndarray)}
    fixed = {x: y for x, y in arguments.items() if x not in given}
    return jax.jit(lambda given, *x: program(partial(function, **fixed, **given), *x)), given


def check(kernels: KernelSet, call: Call, which: str) -> Iterator[Row]:
    """The errors of a call, as kernel_report has them."""
    case = f"{kernels.name} {call.shape} {call.name} {which}"
    program, names = _PROGRAMS[which]
    arrays = drawn(kernels, call)
    ours, given = compiled_for(program, attention, call.arguments)
    spoiled = [_with_padding(x, call, np.nan) for x in arrays]
    lowered = ours.lower(given, *spoiled)
    count = lowered.as_text().count(f"@{compiled.TANGENT_TARGET}")
    yield row(case, "kernels", abs(count - 1), 0.0)
    got = lowered.compile()(given, *spoiled)
    for name, x, y in zip(names, got, expected(which, arrays, call.seen), strict=True):
        allowed = 1e-3 if "lse" in name else _ALLOWED[kernels.dtype]
        # The error of a gradient is that of the tangent in it as well.
        allowed *= 2 if name.startswith("d") else 1
        yield row(case, name, relative_error(x, y), allowed)


def expected(which: str, arrays: list[np.ndarray], seen: np.ndarray) -> Sequence[np.ndarray]:
    """What a program computes, from the reference."""
    found = reference(arrays, seen)
    if which == "gradients":
        return found[4:]
    if which == "jvp":
        return found[:4]
    also = reference([*arrays[:4], arrays[1], arrays[5]], seen)
    return [np.stack(x) for x in zip(found[:4], also[:4], strict=True)]


def timed_calls() -> dict[str, dict[str, Any]]:
    """The arguments of calls of 4,096 rows."""
    ids = documents((512,) * 8, 0).repeat(2, axis=0)
    eight = {"query_segment_ids": ids, "key_value_segment_ids": ids, "max_segments": 8}
    return {
        "causal": {"is_causal": True},
        "causal, window 1024": {"is_causal": True, "local_window_size": (1023, 0)},
        "8 documents": eight,
        "full": {},
        "8 documents, causal": eight | {"is_causal": True},
    }


def times(until: float) -> dict[str, dict[str, float]]:
    """Microseconds of a forward pass, and of it and the tangent by the kernel and by formulas, of
    the calls that begin before a time."""
    found = {}
    b, t, n, k, h = 2, 4096, 16, 4, 128
    shapes = 2 * [(b, t, n, h), (b, t, k, h), (b, t, k, h)]
    arrays = [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)]
    for call, arguments in timed_calls().items():
        if time.perf_counter() > until:
            break
        forward, given = compiled_for(lambda f, *x: f(*x[:3]), attention, arguments)
        both, _ = compiled_for(moved, attention, arguments)
        operands = (given, *arrays)
        programs = {
            x: y.lower(*operands).compile() for x, y in (("forward", forward), ("kernel", both))
        }
        with mock.patch.object(tangents, "derivative_on", lambda *_: OVER_DEVICES):
            jax.clear_caches()
            programs["formulas"] = both.lower(*operands).compile()
        jax.clear_caches()
        name = f"d128 16/4 B2 S4096 {call}"
        found[name] = measured({x: partial(y, *operands) for x, y in programs.items()})
        share = found[name]["kernel"] / found[name]["formulas"]
        print(name, found[name], f"kernel / formulas {share:.3f}", flush=True)
    return found


def in_order(sets: list[KernelSet]) -> Iterator[tuple[KernelSet, Call, str]]:
    """The checks: one of each kind of mask and of each program first, the timed set's first."""
    sets = sorted(sets, key=lambda x: x.name != "sm90_d128_bfloat16")
    seen, later = set[tuple[str, str]](), list[tuple[KernelSet, Call, str]]()
    for kernels in sets:
        for call in calls():
            for which in call.programs:
                one = (kernels, call, which)
                kind = (call.name, "") if which == "jvp" else ("", which)
                if kind in seen:
                    later.append(one)
                else:
                    seen.add(kind)
                    yield one
    yield from later


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--seconds",
        type=float,
        default=100,
        help="begin no check after these, and no measurement 50 later; default: 100",
    )
    parser.add_argument(
        "--sets", nargs="+", default=["*"], metavar="GLOB", help="only sets named so: '*float16'"
    )
    options = parser.parse_args()
    library, start = compiled.find(), time.perf_counter()
    if not library.is_usable:
        sys.exit(library.unusable_reason)
    rows: list[Row] = []
    sets = [x for x in library.sets if x.has_tangents]
    sets = [x for x in sets if any(fnmatchcase(x.name, y) for y in options.sets)]
    has_timed_set, left = "sm90_d128_bfloat16" in {x.name for x in sets}, 0
    with fallback("silent"):
        for kernels, call, which in in_order(sets):
            if time.perf_counter() - start > options.seconds:
                left += 1
                continue
            began, before = time.perf_counter(), len(rows)
            rows += check(kernels, call, which)
            is_right = all(x["right"] for x in rows[before:])
            taken = f"{time.perf_counter() - began:.1f} s"
            print("right" if is_right else "WRONG", rows[before]["case"], taken, flush=True)
        for result in dict.fromkeys(x["result"] for x in rows):
            worst = max(x["error"] for x in rows if x["result"] == result)
            print(f"{result}: worst error {worst:.2e}", flush=True)
        os.environ["ATTN_DISPATCH_POISON"] = ""
        found = times(start + options.seconds + 50) if has_timed_set else {}
    wrong = sum(not x["right"] for x in rows)
    for wrong_row in (x for x in rows if not x["right"]):
        print("WRONG", wrong_row)
    taken = f"{time.perf_counter() - start:.0f} s"
    print(f"{len(rows)} checks, {wrong} wrong, {left} calls left out, {taken}", flush=True)
    if options.out:
        kernel_report.write(options.out, "fa4_tangent", library.versions, rows, found)
    return int(wrong > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
