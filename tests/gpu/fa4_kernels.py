"""Checks FlashAttention-4's compiled kernels under drawn masks, and measures them.

usage: python tests/gpu/fa4_kernels.py [--set NAME ...] [--seconds N] [--sinks] [--times]
                                       [--out FOLDER]

The library is that of ATTN_DISPATCH_FA4_LIBRARY, or else where build-fa4 puts it. Results and
scratch memory are filled with NaN before every call. Every set of kernels runs every kind of mask
in several shapes: grouped heads, lengths that end within a tile, other numbers of keys than of
rows, rows that see nothing. Each call runs without sinks and with drawn ones, of which some are
infinite or large. The exit status is 1 if an error exceeds what is allowed.

--sinks leaves out the calls without sinks. --times measures 8,192 rows of 32 heads on 8, head dim
128, beside what attn_dispatch runs today; and 64 heads on 8, head dim 64, with and without sinks.
"""

from __future__ import annotations

import os

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import attn_dispatch
from attn_dispatch import mods
from attn_dispatch.fa4 import compiled, interval_calls
from attn_dispatch.fa4.compiled import KernelSet
from attn_dispatch.semantics.sinks import delta_of, with_sinks
from tests.gpu import kernel_report
from tests.gpu.kernel_report import Row, measured, row
from tests.support import bits
from tests.support import interval_attention as attention
from tests.support import interval_masks as intervals
from tests.support import interval_runs as runs

# Batch, query rows, keys, query heads, key heads.
_SHAPES = (
    (2, 1000, 1000, 8, 2),
    (1, 777, 1500, 4, 4),
    (2, 512, 512, 8, 1),
    (1, 1030, 260, 6, 6),
)


_run = jax.jit(runs.results, static_argnames="scale")


def masks_of(seed: int, shape: tuple[int, int, int, int, int]) -> dict[str, np.ndarray]:
    """Rows of every kind, some of them also as dense masks, and drawn dense masks."""
    batch, length, keys, heads, _ = shape
    rng = np.random.default_rng(seed)
    masks = intervals.masks(seed, batch, length, keys)
    for name in ("causal", "full", "window and sinks", "random", "few rows", "nothing"):
        masks[f"{name}, as bits"] = intervals.dense(masks[name], keys)[:, None]
    for b, n in {(1, 1), (batch, 1), (1, heads), (batch, heads)}:
        masks[f"dense [{b}, {n}]"] = bits.drawn(rng, (b, n, length, keys))
    return masks


def sinks_of(seed: int, shape: tuple[int, int, int, int, int]) -> dict[str, np.ndarray]:
    """Sinks of one batch row and of all, which take a share that varies, and some that take
    nothing or everything."""
    rng = np.random.default_rng(seed)
    drawn = {
        f"sinks [{x}, {shape[3]}]": (4 + 2 * rng.standard_normal((x, shape[3]))).astype(np.float32)
        for x in {1, shape[0]}
    }
    extreme = np.resize(np.asarray([-np.inf, 1e4, -1e4, 5, 3e38], np.float32), (1, shape[3]))
    return drawn | {"extreme sinks": extreme}


def check_set(kernels: KernelSet, deadline: float, *, only_sinks: bool) -> Iterator[Row]:
    """The checks of every mask in every shape."""
    dims = (kernels.head_dim, kernels.head_dim_v)
    for seed, shape in enumerate(_SHAPES):
        inputs = attention.drawn(seed, shape, dims, kernels.dtype)
        sinks = sinks_of(seed, shape) if kernels.takes_sinks else {}
        for i, (name, mask) in enumerate(masks_of(seed, shape).items()):
            calls = {} if only_sinks else {name: inputs}
            if sinks:  # one kind with each mask, in turn
                kind = list(sinks)[i % len(sinks)]
                calls[f"{name}, {kind}"] = replace(inputs, sinks=jnp.asarray(sinks[kind]))
            for case, one in calls.items():
                if time.monotonic() > deadline:
                    return
                case = f"{kernels.name} {list(shape)} {case}"
                yield from check_mask(case, one, mask, dims[0] ** -0.5)


def check_mask(
    case: str, inputs: attention.Inputs, mask: np.ndarray, scale: float
) -> Iterator[Row]:
    """The checks of one call, and that its forward pass computes the same again."""
    operands = runs.mask_operands(mask, inputs)
    got = _run(inputs, operands, scale)
    yield from kernel_report.rows_of(case, runs.checks(inputs, mask, got, scale))
    again = _run(inputs, operands, scale)
    same = all(bool((x == y).all()) for x, y in zip(got[:2], again[:2], strict=True))
    yield row(case, "again", 0.0 if same else float("inf"), 0.0)


def check_graphs() -> Iterator[Row]:
    """Several calls in one program, which XLA captures in a command buffer, run several times."""
    inputs = attention.drawn(0, (1, 512, 512, 8, 2), (128, 128), "bfloat16")
    rows, lists, _ = runs.mask_operands(intervals.window(512, 512, 200), inputs)

    @jax.jit
    def layers(query: jax.Array) -> jax.Array:
        for _ in range(6):
            out, _ = interval_calls.forward(query, inputs.key, inputs.value, rows, lists, 0.1)
            query = query + out
        return query

    first = layers(inputs.query)
    for i in range(5):
        is_same = bool((layers(inputs.query) == first).all())
        yield row(f"command buffers, run {i + 2}", "out", 0.0 if is_same else float("inf"), 0.0)


# ---- times


def differentiated(function: Callable[..., jax.Array]) -> Callable[..., object]:
    def both(q, k, v, out_grad):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(out_grad)

    return jax.jit(both)


def time_masks(length: int = 8192) -> dict[str, dict[str, float]]:
    """Microseconds of forward (f) and forward with backward (f+b) for some masks."""
    inputs = attention.drawn(0, (1, length, length, 32, 8), (128, 128), "bfloat16")
    ids = jnp.repeat(jnp.arange(1, 9, dtype=jnp.int32), length // 8)[None]
    starts = np.arange(length) // (length // 8) * (length // 8)
    t = np.arange(length)
    documents = np.stack([starts, t + 1 - starts, 0 * t, 0 * t], -1).astype(np.int32)[None]
    n = length
    cases = {
        "causal": (intervals.causal(n, n), {}),
        "8 documents": (documents, {"query_segment_ids": ids, "max_segments": 8}),
        "window 1024": (intervals.window(n, n, 1024), {"local_window_size": (1023, 0)}),
        "prefix 2048": (
            intervals.prefix(n, n, 2048),
            {"is_causal": False, "mask_mod": mods.prefix_lm(jnp.array([2048], jnp.int32))},
        ),
        "window 1024 and 64 sinks": (
            intervals.window_and_sinks(n, n, 1024, 64),
            {"mask_mod": lambda b, n, t, s: (s < 64) | (t - s < 1024)},
        ),
    }
    found = {}
    for name, (rows, options) in cases.items():
        found |= time_mask(name, inputs, rows, {"is_causal": True} | options)
    return found


def time_sinks(length: int = 8192) -> dict[str, dict[str, float]]:
    """The same for calls without sinks, with sinks in the kernel, and with sinks taken into out and
    lse afterwards; and of whole calls by our kernels and by cuDNN."""
    inputs = attention.drawn(0, (1, length, length, 64, 8), (64, 64), "bfloat16")
    arrays = (inputs.query, inputs.key, inputs.value)
    sinks = jnp.linspace(-2, 6, 64, dtype=jnp.float32)[None]
    found = {}
    for name, rows, window in (
        ("causal", intervals.causal(length, length), (None, None)),
        ("window 128", intervals.window(length, length, 128), (127, 0)),
    ):
        programs = {
            "without": programs_of(inputs, rows),
            "in the kernel": programs_of(replace(inputs, sinks=sinks), rows),
            "afterwards": programs_of(replace(inputs, sinks=sinks), rows, is_afterwards=True),
        }
        for implementation in ("fa4", "cudnn"):

            def call(q, k, v, implementation=implementation, window=window):
                return attn_dispatch.dot_product_attention(
                    q, k, v, sinks=sinks[0], is_causal=True, local_window_size=window,
                    implementation=implementation,
                )  # fmt: skip

            programs[f"call of {implementation}"] = (jax.jit(call), differentiated(call))
        for what, which, given in (("f", 0, arrays), ("f+b", 1, (*arrays, inputs.out_grad))):
            times = measured({x: partial(y[which], *given) for x, y in programs.items()})
            shown = ", ".join(f"{x} {y:.0f} us" for x, y in times.items())
            print(f"sinks, {name} {what}: {shown}", flush=True)
            found[f"sinks, {name} {what}"] = times
    return found


def programs_of(
    inputs: attention.Inputs, mask: np.ndarray, *, is_afterwards: bool = False
) -> tuple[Callable[..., object], Callable[..., object]]:
    """The forward pass of a mask, and both passes, with sinks in the kernel or after it."""
    scale = inputs.query.shape[-1] ** -0.5
    data, forward_lists, backward_lists = jax.device_put(runs.mask_operands(mask, inputs))
    sinks = inputs.sinks

    def forward(q, k, v):
        inside = None if is_afterwards else sinks
        out, lse = interval_calls.forward(q, k, v, data, forward_lists, scale, sinks=inside)
        if not is_afterwards:
            return out, lse
        return tuple(with_sinks({"out": out, "lse": lse}, sinks).values())

    def both(q, k, v, out_grad):
        out, lse = forward(q, k, v)
        *gradients, products = interval_calls.backward(
            q, k, v, out, lse, out_grad, None, data, backward_lists, scale
        )
        if sinks is not None:
            if is_afterwards:
                products = delta_of({"out": out, "out_grad": out_grad})
            gradients.append(attention.sinks_grad(sinks, lse, -products))
        return out, *gradients

    return jax.jit(forward), jax.jit(both)


def time_mask(name: str, inputs: attention.Inputs, rows: np.ndarray, options: dict):
    """The two rows of a mask: of ours, by rows and by bits, and of what runs the call today."""
    arrays = (inputs.query, inputs.key, inputs.value)
    programs = {"ours": programs_of(inputs, rows)}
    programs["bits"] = programs_of(inputs, intervals.dense(rows, inputs.key.shape[1])[:, None])

    def today(q, k, v):
        return attn_dispatch.dot_product_attention(q, k, v, **options)

    programs["today"] = (jax.jit(today), differentiated(today))
    pairs = float(intervals.dense(rows, inputs.key.shape[1]).sum())
    flops = 4 * inputs.query.shape[2] * inputs.query.shape[3] * pairs
    found = {}
    for what, which, given, work in (
        ("f", 0, arrays, flops),
        ("f+b", 1, (*arrays, inputs.out_grad), 3.5 * flops),
    ):
        microseconds = measured({x: partial(y[which], *given) for x, y in programs.items()})
        shown = ", ".join(
            f"{x} {y:.0f} us ({work / y / 1e6:.0f} TFLOP/s)" for x, y in microseconds.items()
        )
        print(f"{name} {what}: {shown}", flush=True)
        found[f"{name} {what}"] = microseconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", dest="sets", help="a pattern of sets' names")
    parser.add_argument("--seconds", type=float, default=420, help="the time for checks")
    parser.add_argument("--sinks", action="store_true", help="check calls with sinks alone")
    parser.add_argument("--times", action="store_true", help="measure as well")
    parser.add_argument("--out", type=Path, help="a folder for the numbers")
    args = parser.parse_args()
    library = compiled.find()
    if not library.is_usable:
        sys.exit(f"error: {library.unusable_reason}")
    compiled.register()
    print(f"{library.path}: {library.versions}; {jax.devices()[0].device_kind}", flush=True)
    times: dict[str, dict[str, float]] = {}
    if args.times:
        poison = os.environ.pop("ATTN_DISPATCH_POISON")
        times = ({} if args.sinks else time_masks()) | time_sinks()
        os.environ["ATTN_DISPATCH_POISON"] = poison
    rows = check_all(library, args.sets or ["*"], args.seconds, only_sinks=args.sinks)
    wrong = sum(not x["right"] for x in rows)
    if args.out:
        kernel_report.write(args.out, "fa4_kernels", library.versions, rows, times)
    print(f"{len(rows)} checks, {wrong} wrong", flush=True)
    sys.exit(1 if wrong or not rows else 0)


def check_all(
    library: compiled.CompiledLibrary, patterns: list[str], seconds: float, *, only_sinks: bool
) -> list[Row]:
    sets = [x for x in library.sets if not x.variant]
    sets = [x for x in sets if any(fnmatch.fnmatchcase(x.name, y) for y in patterns)]

    def check(kernels: KernelSet, deadline: float) -> Iterator[Row]:
        yield from check_set(kernels, deadline, only_sinks=only_sinks)
        if kernels is sets[0]:
            yield from check_graphs()

    return kernel_report.check_sets(sets, check, seconds)


if __name__ == "__main__":
    main()
