"""Decoding beside a cache: one query of each row, or a few, contiguous or in pages.

usage: python benchmarks/decode.py [--rounds N] [--seconds S] [--results FOLDER]

A program makes 16 steps, each of whose queries is the result of the one before, so that nothing but
the GPU is timed; all calls of a cell take turns, and medians are printed. "copy" is a copy of the
keys on the device: what it reads and writes in its time is the bandwidth that a call is compared
with, which reads keys and values once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import decode_peers
import jax
import jax.numpy as jnp
from command import arguments, save

from attn_dispatch import dot_product_attention, paged_attention
from attn_dispatch.conformance.environment import environment

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
_ASKED = {"is_causal": True, "causal_alignment": "bottom_right", "implementation": "cudnn"}


def repeated(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Of the arguments of a call the result of the last of its steps."""

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


def measured(cell: tuple[int, ...], rounds: int, torch: decode_peers.Torch) -> dict[str, float]:
    """Microseconds of each call of a cell, and what follows from them."""
    programs, times = calls_of(*cell), {}
    for run, given in programs.values():
        jax.block_until_ready(run(*given))
    for _ in range(rounds):
        for name, (run, given) in programs.items():
            steps, repeats = (1, 16) if name == "copy" else (_STEPS, 1)
            result, started = None, time.perf_counter()
            for _ in range(repeats):
                result = run(*given)
            jax.block_until_ready(result)
            took = (time.perf_counter() - started) / steps / repeats
            times.setdefault(name, []).append(1e6 * took)
    found = {name: statistics.median(x) for name, x in times.items()} | torch.times(cell, rounds)
    # The copy reads and writes as many bytes as keys and values have together.
    return found | {"of the copy's bandwidth": found["copy"] / found["lengths, full"]}


def main() -> None:
    args = arguments(__doc__ or "", rounds=7, seconds=0)
    rows, torch = [], decode_peers.Torch()
    for cell in _CELLS:
        batch, keys, heads, kv_heads, dim = cell
        name = f"{batch} rows of {keys} keys, {heads}/{kv_heads} heads, d{dim}"
        row = {x: round(y, 2) for x, y in measured(cell, args.rounds, torch).items()}
        print(f"{name}: " + ", ".join(f"{x} {y}" for x, y in row.items()), flush=True)
        rows.append({"cell": name, "us": row})
        save("decode", {"environment": environment(), "rows": rows}, args.results)
    torch.close()


if __name__ == "__main__":
    main()
