"""Chunks of prompts and decoding in one call on pages, compared with each of them alone.

usage: python benchmarks/ragged.py [--rounds N] [--seconds S] [--out FOLDER]

The method is that of decode.py: 16 steps per program, medians. "ragged" is the call with
cu_seqlens_q. "gathered" is the same on a batch padded to the longest sequence, for which every key
that the table has room for is copied; "single" decodes one query in as many rows; "chunk" has only
the longest sequence.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import arguments, save
from decode import repeated

import attn_dispatch.paged
from attn_dispatch import paged_attention
from attn_dispatch_tools.reports.environment import environment

_CELLS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "63 single, a chunk of 512": ((64, 4096, 32, 8, 128), (1,) * 63 + (512,)),
    "255 single, a chunk of 512": ((256, 1024, 32, 8, 128), (1,) * 255 + (512,)),
    "15 single, a chunk of 2048": ((16, 8192, 32, 8, 128), (1,) * 15 + (2048,)),
    "60 single, 4 chunks of 256": ((64, 4096, 32, 8, 128), (1,) * 60 + (256,) * 4),
    "48 single, 15 of 4, a chunk of 512": ((64, 4096, 32, 8, 128), (1,) * 48 + (4,) * 15 + (512,)),
    "8 chunks of 256": ((8, 4096, 32, 8, 128), (256,) * 8),
    "63 single, a chunk of 512, MHA": ((64, 4096, 16, 16, 64), (1,) * 63 + (512,)),
    "one chunk of 512": ((1, 8192, 32, 8, 128), (512,)),
}
"""(batch, keys, heads, kv heads, head dim), and the number of queries of each row."""
_PAGE = 64


def programs_of(
    cell: tuple[int, ...], queries: tuple[int, ...], **options: Any
) -> dict[str, tuple[Any, ...]]:
    """The programs of a cell by name, each with its arguments."""
    batch, keys, heads, kv_heads, dim = cell
    seeds = jax.random.split(jax.random.key(0), 4)
    pools = [
        jax.random.normal(x, (batch * keys // _PAGE, _PAGE, kv_heads, dim), jnp.bfloat16)
        for x in seeds[:2]
    ]
    tokens, longest = sum(queries), max(queries)
    query = jax.random.normal(seeds[2], (tokens, heads, dim), jnp.bfloat16)
    lengths = jnp.full(batch, keys - 3, jnp.int32)
    table = jax.random.permutation(seeds[3], batch * keys // _PAGE).astype(jnp.int32)
    table = table.reshape(batch, -1)
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(queries)]), jnp.int32)

    def ragged(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array, n: jax.Array, cu: jax.Array):
        return paged_attention(
            q, k, v, t, n, cu_seqlens_q=cu, max_seqlen_q=longest, implementation="cudnn", **options
        )

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array, n: jax.Array):
        return paged_attention(q, k, v, t, n, implementation="cudnn", **options)

    given = (*pools, table, lengths)
    single = query[:batch, None]
    chunk = query[None, -longest:]
    longest_row = (*pools, table[-1:], lengths[-1:])
    found: dict[str, tuple[Any, ...]] = {
        "ragged": (repeated(ragged), query, *given, cu),
        "gathered": (repeated(ragged), query, *given, cu),
        "chunk": (repeated(plain), chunk, *longest_row),
    }
    if tokens >= batch:
        found["single"] = (repeated(plain), single, *given)
    return found


def measured(programs: dict[str, tuple[Any, ...]], rounds: int) -> dict[str, float]:
    """The median time of a step of each program, in microseconds."""
    times: dict[str, list[float]] = {}
    in_blocks = attn_dispatch.paged.fits_query_blocks
    for round_ in range(rounds + 1):
        for name, (run, *given) in programs.items():
            if name == "gathered":
                attn_dispatch.paged.fits_query_blocks = lambda spec: False
            started = time.perf_counter()
            jax.block_until_ready(run(*given))
            attn_dispatch.paged.fits_query_blocks = in_blocks
            if round_:
                times.setdefault(name, []).append(1e6 * (time.perf_counter() - started) / 16)
    return {name: round(statistics.median(x), 1) for name, x in times.items()}


def main() -> None:
    args = arguments(__doc__ or "", rounds=7, seconds=0)
    rows = []
    for name, (cell, queries) in _CELLS.items():
        found = measured(programs_of(cell, queries), args.rounds)
        print(f"{name} {cell}: {found}", flush=True)
        rows.append({"cell": name, "shape": cell, "queries": queries, "us": found})
        save("ragged", {"environment": environment(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
