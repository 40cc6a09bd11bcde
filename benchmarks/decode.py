"""Decoding with a cache, contiguous or in pages: one or a few queries per row.

usage: python benchmarks/decode.py [--rounds N] [--out FOLDER] [--cells N ...] [--without-torch]

A program makes 16 steps, each of which takes the result of the step before as its queries; all
programs of a cell take turns. "us" is a step's wall time, the median of the rounds. If a call takes
less than some 50 us, the host needs that time to launch it. "device_us" is the time for which
kernels ran, from the profiler. This is what the call costs in a program whose kernels are launched
by GPU graphs, as those of a model's layers are (serve.py). "copy" copies the keys on the device.
The bandwidth at which it reads and writes is compared with that of a call, which reads keys and
values once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import decode_peers
import jax
import jax.numpy as jnp
from command import save

from attn_dispatch import dot_product_attention, paged_attention
from attn_dispatch_tools.bench.device_time import busy_seconds
from attn_dispatch_tools.reports.environment import environment

_STEPS = 16
_CELLS = (
    (1, 32768, 32, 8, 128),
    (16, 8192, 32, 8, 128),
    (64, 4096, 32, 8, 128),
    (256, 1024, 32, 8, 128),
    (16, 8192, 32, 32, 128),
    (16, 8192, 32, 1, 128),
    (16, 8192, 32, 8, 64),
    (16, 8192, 32, 32, 64),
    (16, 8192, 32, 1, 64),
    (16, 8192, 16, 4, 256),
)
"""Batch, keys, heads, kv heads, head dim."""
_PAGE_SIZES = (16, 64, 256)
_PROFILES = 3
_ASKED = {"is_causal": True, "causal_alignment": "bottom_right", "implementation": "cudnn"}


def repeated(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A program that repeats the call, with each result as the next query; returns the last one."""

    def run(query: jax.Array, *others: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _STEPS, lambda _, q: call(q, *others), query)

    return jax.jit(run)


def calls_of(batch: int, keys: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """The programs of a cell by name, each with its arguments."""
    seeds = jax.random.split(jax.random.key(0), 4)
    key, value = (
        jax.random.normal(x, (batch, keys, kv_heads, dim), jnp.bfloat16) for x in seeds[:2]
    )
    query = {
        t: jax.random.normal(seeds[2], (batch, t, heads, dim), jnp.bfloat16) for t in (1, 4, 8)
    }
    full, half = (jnp.full(batch, x, jnp.int32) for x in (keys, keys // 2))
    ours = partial(dot_product_attention, **_ASKED)
    theirs = partial(jax.nn.dot_product_attention, implementation="cudnn")

    def with_lengths(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
        return ours(q, k, v, key_value_seq_lengths=n)

    def theirs_with_lengths(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
        ones = jnp.ones_like(n)
        return theirs(q, k, v, query_seq_lengths=ones, key_value_seq_lengths=n)

    found = {
        "whole cache": (ours, query[1], key, value),
        "lengths, full": (with_lengths, query[1], key, value, full),
        "lengths, half": (with_lengths, query[1], key, value, half),
        "4 queries": (with_lengths, query[4], key, value, full),
        "8 queries": (with_lengths, query[8], key, value, full),
        "jax.nn": (theirs, query[1], key, value),
        "jax.nn, lengths": (theirs_with_lengths, query[1], key, value, full),
    }
    paged = partial(paged_attention, implementation="cudnn")
    for size in _PAGE_SIZES:
        table = jax.random.permutation(seeds[3], batch * keys // size).astype(jnp.int32)
        pages = [x.reshape(-1, size, kv_heads, dim) for x in (key, value)]
        rest = (pages[0], pages[1], table.reshape(batch, -1))
        found[f"pages of {size}"] = (paged, query[1], *rest, full)
        if size == 64:
            found["pages of 64, half"] = (paged, query[1], *rest, half)
            found["pages of 64, 4 queries"] = (paged, query[4], *rest, full)
            found |= decode_peers.flash_attn3(query, (key, value), rest, full)
    programs = {name: (repeated(call), given) for name, (call, *given) in found.items()}
    return programs | {"copy": (jax.jit(lambda x: x + 1), (key,))}


def measured(
    cell: tuple[int, ...], rounds: int, torch: decode_peers.Torch | None
) -> dict[str, dict[str, float]]:
    """By program of a cell, a step's wall time and its device time in microseconds."""
    programs, wall, device = calls_of(*cell), {}, {}
    for run, given in programs.values():
        jax.block_until_ready(run(*given))
    for _ in range(rounds):
        for name, (run, given) in programs.items():
            started = time.perf_counter()
            steps = _run(name, run, given)
            wall.setdefault(name, []).append(1e6 * (time.perf_counter() - started) / steps)
    for name, (run, given) in programs.items():
        found = [busy_seconds(partial(_run, name, run, given))[0] for _ in range(_PROFILES)]
        known = [x for x in found if x is not None]
        if len(known) == len(found):
            device[name] = 1e6 * statistics.median(known) / _STEPS
    medians = {name: statistics.median(x) for name, x in wall.items()}
    if torch is not None:
        device |= torch.times(cell, rounds)
    return {"us": medians, "device_us": device}


def _run(name: str, run: Callable[..., jax.Array], given: Any) -> int:
    """Run all steps of a program and wait for them; return their number."""
    result: Any = None
    for _ in range(_STEPS if name == "copy" else 1):
        result = run(*given)
    jax.block_until_ready(result)
    return _STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--cells", type=int, nargs="+", help="numbers of cells; default: all")
    parser.add_argument("--without-torch", action="store_true")
    args = parser.parse_args()
    rows, torch = [], None if args.without_torch else decode_peers.Torch()
    for number in args.cells or range(len(_CELLS)):
        batch, keys, heads, kv_heads, dim = cell = _CELLS[number]
        name = f"{batch} rows of {keys} keys, {heads}/{kv_heads} heads, d{dim}"
        row = measured(cell, args.rounds, torch)
        row = {kind: {x: round(y, 2) for x, y in us.items()} for kind, us in row.items()}
        print(name, flush=True)
        for x, us in row["us"].items():
            print(f"  {x}: {us}, device {row['device_us'].get(x)}", flush=True)
        rows.append({"cell": name, **row})
        save("decode", {"environment": environment(), "rows": rows}, args.out)
    if torch is not None:
        torch.close()


if __name__ == "__main__":
    main()
