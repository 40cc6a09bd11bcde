"""Calls with a cache in pages and various options, compared with the same calls on gathered keys.

usage: python benchmarks/cache.py [--rounds N] [--seconds S] [--out FOLDER]

The method is that of decode.py: 16 steps per program, medians. "gathered" begins with the rewrite
that copies every key that the table has room for; "array" is the same call on a contiguous cache.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from command import arguments, save
from decode import _STEPS, repeated

from attn_dispatch import dot_product_attention, paged_attention
from attn_dispatch.core.rewrites.kv_cache.gathered import PAGES_GATHERED
from attn_dispatch.settings import current, restored
from attn_dispatch_tools.reports.environment import environment


def _added(score: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
    return score + 0.1 * jnp.sin(0.01 * (s + n))


_PLAIN = (16, 8192, 32, 8, 128)
_CELLS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "a chunk of 256": (_PLAIN, 256, {}),
    "a chunk of 256, soft cap": (_PLAIN, 256, {"logits_soft_cap": 30.0}),
    "63 single queries, a chunk of 512": ((64, 4096, 32, 8, 128), 512, {"is_mix": True}),
    "soft cap": (_PLAIN, 1, {"logits_soft_cap": 30.0}),
    "soft cap, one row": ((1, 32768, 32, 8, 128), 1, {"logits_soft_cap": 30.0}),
    "soft cap, 4 queries": (_PLAIN, 4, {"logits_soft_cap": 30.0}),
    "sinks": (_PLAIN, 1, {"has_sinks": True}),
    "window of 1024": ((16, 32768, 32, 8, 128), 1, {"local_window_size": (1023, 0)}),
    "window of 10000": ((16, 32768, 32, 8, 128), 1, {"local_window_size": (9999, 0)}),
    "window of 1024, a chunk of 256": (
        (16, 32768, 32, 8, 128),
        256,
        {"local_window_size": (1023, 0)},
    ),
    "16 queries": (_PLAIN, 16, {}),
    "multi-query, 4 queries": ((16, 8192, 32, 1, 128), 4, {}),
    "ALiBi": (_PLAIN, 1, {"has_slopes": True}),
    "ALiBi, 4 queries": (_PLAIN, 4, {"has_slopes": True}),
    "what a score_mod adds": (_PLAIN, 1, {"score_mod": _added}),
    "8 queries": (_PLAIN, 8, {}),
    "multi-query, 16 queries": ((16, 8192, 32, 1, 128), 16, {}),
    "pages of 24": ((16, 6144, 32, 8, 128), 1, {"page": 24}),
}
"""(batch, keys, heads, kv heads, head dim), the number of queries, and options."""


def programs_of(
    cell: tuple[int, ...], t: int, page: int = 64, is_mix: bool = False, has_sinks: bool = False,
    has_slopes: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The programs of a cell by name, each with its arguments."""
    batch, keys, heads, kv_heads, dim = cell
    seeds = jax.random.split(jax.random.key(0), 4)
    key, value = (
        jax.random.normal(x, (batch, keys, kv_heads, dim), jnp.bfloat16) for x in seeds[:2]
    )
    query = jax.random.normal(seeds[2], (batch, t, heads, dim), jnp.bfloat16)
    lengths = jnp.full(batch, keys - 3, jnp.int32)
    table = jax.random.permutation(seeds[3], batch * keys // page).astype(jnp.int32)
    pages = [x.reshape(-1, page, kv_heads, dim) for x in (key, value)]
    if is_mix:
        options["query_seq_lengths"] = jnp.ones(batch, jnp.int32).at[-1].set(t)
    if has_sinks:
        options["sinks"] = jnp.zeros(heads)
    if has_slopes:
        options["alibi_slopes"] = 2.0 ** -jnp.linspace(0.25, 8.0, heads)
    paged = partial(paged_attention, implementation="cudnn", **options)

    def on_array(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
        causal: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
        return dot_product_attention(
            q, k, v, key_value_seq_lengths=n, implementation="cudnn", **causal, **options
        )

    in_pages = (query, *pages, table.reshape(batch, -1), lengths)
    return {
        "pages": (repeated(paged), in_pages),
        "gathered": (repeated(paged), in_pages),
        "array": (repeated(on_array), (query, key, value, lengths)),
    }


def measured(programs: dict[str, Any], rounds: int) -> dict[str, float]:
    """The median time of a step of each program, in microseconds."""
    times: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        for name, (run, given) in programs.items():
            first = PAGES_GATHERED.name if name == "gathered" else None
            with restored(replace(current(), first_rewrite=first)):
                started = time.perf_counter()
                jax.block_until_ready(run(*given))
            if round_:
                took = (time.perf_counter() - started) / _STEPS
                times.setdefault(name, []).append(1e6 * took)
    return {name: statistics.median(x) for name, x in times.items()}


def main() -> None:
    args = arguments(__doc__ or "", rounds=7, seconds=0)
    rows = []
    for name, (cell, t, options) in _CELLS.items():
        found = measured(programs_of(cell, t, **options), args.rounds)
        found = {x: round(y, 1) for x, y in found.items()}
        print(f"{name} {cell}: {found}", flush=True)
        rows.append({"cell": name, "shape": cell, "queries": t, "us": found})
        save("cache", {"environment": environment(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
