"""Checks FlashAttention-4's compiled kernels under drawn masks, and measures them.

usage: python tests/gpu/fa4_kernels.py [--set NAME ...] [--seconds N] [--times N] [--out FOLDER]

The library is that of ATTN_DISPATCH_FA4_LIBRARY, or else where build-fa4 puts it. Results and
scratch memory are filled with NaN before every call. Every set of kernels runs every kind of mask
in several shapes: grouped heads, lengths that end within a tile, other numbers of keys than of
rows, rows that see nothing. The exit status is 1 if an error exceeds what is allowed.

--times measures calls of attn_dispatch by fa4, lists of tiles included, beside flash and cudnn.
"""

from __future__ import annotations

import os

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import fnmatch
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import attn_dispatch
from attn_dispatch import mods
from attn_dispatch.fa4 import compiled, interval_calls
from attn_dispatch.fa4.compiled import KernelSet
from attn_dispatch_tools.reports.environment import environment, file_name
from tests.support import interval_attention as attention
from tests.support import interval_masks as intervals

# Batch, query rows, keys, query heads, key heads.
_SHAPES = (
    (2, 1000, 1000, 8, 2),
    (1, 777, 1500, 4, 4),
    (2, 512, 512, 8, 1),
    (1, 1030, 260, 6, 6),
)


def results(
    inputs: attention.Inputs, rows: jax.Array, forward_lists, backward_lists, scale: float
) -> attention.Results:
    """What the kernels compute."""
    out, lse = interval_calls.forward(
        inputs.query, inputs.key, inputs.value, rows, forward_lists, scale
    )
    gradients = interval_calls.backward(
        inputs.query, inputs.key, inputs.value, out, lse, inputs.out_grad, inputs.lse_grad,
        rows, backward_lists, scale,
    )  # fmt: skip
    return out, lse, *gradients


_run = jax.jit(results, static_argnames="scale")


def lists_for(rows: np.ndarray, query: jax.Array, value: jax.Array):
    """The lists of both passes, for the sets that run these arrays."""
    seen = intervals.dense(rows, value.shape[1])
    forward, backward = (
        x(query, value) for x in (interval_calls.forward_set, interval_calls.backward_set)
    )
    return (
        intervals.lists(seen, *forward.forward_tiles),
        intervals.lists(seen, *backward.backward_tiles, by_keys=True),
    )


def check_set(kernels: KernelSet, deadline: float) -> Iterator[tuple[str, attention.Check]]:
    """A check of every result of every mask in every shape."""
    dims = (kernels.head_dim, kernels.head_dim_v)
    for seed, shape in enumerate(_SHAPES):
        inputs = attention.drawn(seed, shape, dims, kernels.dtype)
        for mask, rows in intervals.masks(seed, shape[0], shape[1], shape[2]).items():
            if time.monotonic() > deadline:
                return
            for check in check_mask(inputs, rows, dims[0] ** -0.5):
                yield f"{kernels.name} {list(shape)} {mask}", check


def check_mask(
    inputs: attention.Inputs, rows: np.ndarray, scale: float
) -> Iterator[attention.Check]:
    """The checks of one call, and that its forward pass computes the same again."""
    lists = lists_for(rows, inputs.query, inputs.value)
    seen = jnp.asarray(intervals.dense(rows, inputs.key.shape[1]))
    got = _run(inputs, rows, *lists, scale)
    plain = attention.computed(inputs, seen, scale, is_exact=False)
    exact = attention.computed(inputs, seen, scale, is_exact=True)
    rounded = attention.lost_by_rounding(inputs, got[0], exact[0])
    gradients = attention.computed(rounded, seen, scale, is_exact=True)[2:]
    yield from attention.checks(got, (*exact[:2], *gradients), plain)
    again = _run(inputs, rows, *lists, scale)
    same = all(bool((x == y).all()) for x, y in zip(got[:2], again[:2], strict=True))
    yield attention.Check("again", 0.0 if same else float("inf"), 0.0, 0.0, 0.0)


def check_graphs() -> Iterator[tuple[str, attention.Check]]:
    """Several calls in one program, which XLA captures in a command buffer, run several times."""
    inputs = attention.drawn(0, (1, 512, 512, 8, 2), (128, 128), "bfloat16")
    rows = intervals.window(512, 512, 200)
    lists = lists_for(rows, inputs.query, inputs.value)

    @jax.jit
    def layers(query: jax.Array) -> jax.Array:
        for _ in range(6):
            out, _ = interval_calls.forward(query, inputs.key, inputs.value, rows, lists[0], 0.1)
            query = query + out
        return query

    first = layers(inputs.query)
    for i in range(5):
        is_same = bool((layers(inputs.query) == first).all())
        error = 0.0 if is_same else float("inf")
        yield f"command buffers, run {i + 2}", attention.Check("out", error, 0.0, 0.0, 0.0)


# ---- times

Program = tuple[Callable[..., object], tuple[jax.Array, ...]]


def seconds_of_call(program: Program, calls: int) -> float:
    run, arguments = program
    started, result = time.perf_counter(), None
    for _ in range(calls):
        result = run(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / calls


def measured(programs: Mapping[str, Program], rounds: int = 6) -> dict[str, float]:
    """Microseconds of each program, the median over rounds that run them forth and back."""
    calls = {}
    for name, program in programs.items():
        try:
            seconds_of_call(program, 2)
            calls[name] = max(5, int(0.04 / seconds_of_call(program, 5)))
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(seconds_of_call(programs[name], calls[name]))
    return {name: round(1e6 * statistics.median(x), 1) for name, x in times.items()}


def differentiated(function: Callable[..., jax.Array]) -> Callable[..., object]:
    def both(q, k, v, out_grad):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(out_grad)

    return jax.jit(both)


@dataclass(frozen=True)
class TimedCall:
    """A call of the public function, batch 1, bfloat16, with as many keys as queries."""

    name: str
    options: Mapping[str, Any]
    length: int = 8192
    heads: tuple[int, int] = (32, 8)
    head_dims: tuple[int, int] = (128, 128)

    def __str__(self) -> str:
        dims = "/".join(map(str, dict.fromkeys(self.head_dims)))
        return f"{self.name}, {self.length} rows, {self.heads[0]}/{self.heads[1]} heads, d{dims}"


def window_and_sinks(window: int, sinks: int) -> Callable[..., jax.Array]:
    return lambda b, n, t, s: (s < sinks) | (t - s < window)


_EIGHT = jnp.repeat(jnp.arange(1, 9, dtype=jnp.int32), 1024)[None]

_TIMED = (
    TimedCall("causal", {"is_causal": True}),
    TimedCall("8 documents", {"is_causal": True, "query_segment_ids": _EIGHT, "max_segments": 8}),
    TimedCall("window 1024", {"is_causal": True, "local_window_size": (1023, 0)}),
    TimedCall("prefix 2048", {"mask_mod": mods.prefix_lm(jnp.array([2048], jnp.int32))}),
    TimedCall(
        "window 1024 and 64 sinks",
        {"is_causal": True, "mask_mod": window_and_sinks(1024, 64)},
    ),
    TimedCall("causal", {"is_causal": True}, heads=(16, 16), head_dims=(192, 128)),
    TimedCall(
        "prefix 8192", {"mask_mod": mods.prefix_lm(jnp.array([8192], jnp.int32))}, length=32768
    ),
    TimedCall(
        "window 4096 and 64 sinks",
        {"is_causal": True, "mask_mod": window_and_sinks(4096, 64)},
        length=32768,
    ),
)


def time_call(call: TimedCall, deadline: float) -> dict[str, dict[str, float]]:
    """Microseconds of a call by each implementation: forward, and forward with backward."""
    shape = (1, call.length, call.length, *call.heads)
    inputs = attention.drawn(0, shape, call.head_dims, "bfloat16")
    arrays = (inputs.query, inputs.key, inputs.value)

    def by(name: str) -> Callable[..., jax.Array]:
        return functools.partial(
            attn_dispatch.dot_product_attention, implementation=name, **call.options
        )

    found = {}
    names = ("fa4", "flash", "cudnn")
    for what, programs in (
        ("f", {x: (jax.jit(by(x)), arrays) for x in names}),
        ("f+b", {x: (differentiated(by(x)), (*arrays, inputs.out_grad)) for x in names}),
    ):
        if time.monotonic() < deadline:
            microseconds = measured(programs)
            print(f"{call} {what}: {microseconds}", flush=True)
            found[f"{call} {what}"] = microseconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", dest="sets", help="a pattern of sets' names")
    parser.add_argument("--seconds", type=float, default=420, help="the time for checks")
    parser.add_argument("--times", type=float, default=0, help="seconds for measurements")
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
        deadline = time.monotonic() + args.times
        for call in _TIMED:
            times |= time_call(call, deadline)
        os.environ["ATTN_DISPATCH_POISON"] = poison
    sets = check_all(library, args.sets or ["*"], time.monotonic() + args.seconds)
    count = sum(x["checks"] for x in sets.values())
    wrong = sum(len(x["wrong"]) for x in sets.values())
    if args.out:
        facts = environment()
        report = {"environment": facts, "kernels": library.versions, "checks": count,
                  "not right": wrong, "microseconds": times, "sets": sets}  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        file = args.out / f"{file_name('fa4_kernels', facts)}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{count} checks, {wrong} wrong", flush=True)
    sys.exit(1 if wrong or not count else 0)


def check_all(
    library: compiled.CompiledLibrary, patterns: list[str], deadline: float
) -> dict[str, dict[str, Any]]:
    """For each set its number of checks, the largest error / allowed, and what was wrong."""
    chosen = [x for x in library.sets if any(fnmatch.fnmatchcase(x.name, y) for y in patterns)]
    found: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    for i, kernels in enumerate(chosen):
        # A share of the time for each, so that none is left out.
        until = started + (deadline - started) * (i + 1) / len(chosen)
        count, worst, wrong = 0, dict[str, float](), list[str]()
        for case, check in (*check_set(kernels, until), *(check_graphs() if i == 0 else ())):
            share = check.error / check.allowed if check.allowed else float(check.error > 0)
            worst[check.name] = round(max(worst.get(check.name, 0.0), share), 3)
            count += 1
            if not check.is_right:
                wrong.append(f"{case} {check}")
                print(f"  WRONG {wrong[-1]}", flush=True)
        print(f"{kernels.name}: {count} checks; largest error / allowed: {worst} "
              f"[{time.monotonic() - started:.0f} s]", flush=True)  # fmt: skip
        found[kernels.name] = {"checks": count, "largest error / allowed": worst, "wrong": wrong}
    return found


if __name__ == "__main__":
    main()
