"""Attention on a cache: decoding, chunks of prompts, and both in one call.

A program makes 16 steps, each of which takes the result of the step before as its queries; all
programs of a cell take turns. "us" is a step's wall time, the median of the rounds. If a call takes
less than some 50 us, the host needs that time to launch it. "device_us" is the time for which
kernels ran, from the profiler. This is what the call costs in a program whose kernels are launched
by GPU graphs, as those of a model's layers are.

decode  one or a few queries per row on a contiguous cache and on pages, beside jax.nn and the
        packages of decode_peers.py. "copy" copies the keys on the device: the bandwidth at which it
        reads and writes is compared with that of a call, which reads keys and values once.
pages   options, and more queries, on pages. "gathered" begins with the rewrite that copies every
        key that the table has room for; "array" is the same call on a contiguous cache.
ragged  rows with different numbers of queries. "ragged" is the call with cu_seqlens_q, "gathered"
        the same on a batch padded to the longest row; "single" decodes one query in as many rows;
        "chunk" has only the longest row.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import decode_peers
import jax
import jax.numpy as jnp
import numpy as np
from harness import Script, device_us

import attn_dispatch.paged
from attn_dispatch import dot_product_attention, paged_attention
from attn_dispatch.core.rewrites.kv_cache.gathered import PAGES_GATHERED
from attn_dispatch.settings import current, restored

STEPS, PROFILES = 16, 3
BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}

Call = Callable[..., jax.Array]
Programs = dict[str, tuple[Any, ...]]
"""By name, a call and its arguments. The first is the query, whose shape the result has."""


@dataclass(frozen=True)
class Cache:
    """The sizes of a cache, and its arrays."""

    batch: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads, d{self.dim}"
        return f"{self.batch} rows of {self.keys} keys, {heads}"

    def query(self, *leading: int) -> jax.Array:
        return self._drawn(2, *leading, self.heads)

    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """key and value, [B, S, K, H]."""
        shape = (self.batch, self.keys, self.kv_heads)
        return self._drawn(0, *shape), self._drawn(1, *shape)

    def pages(self, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same as pages [P, size, K, H] in any order, and their table [B, M]."""
        key, value = (x.reshape(-1, size, *x.shape[2:]) for x in self.arrays())
        table = jax.random.permutation(self._seeds()[3], len(key)).astype(jnp.int32)
        return key, value, table.reshape(self.batch, -1)

    def lengths(self, keys: int) -> jax.Array:
        return jnp.full(self.batch, keys, jnp.int32)

    def _seeds(self) -> jax.Array:
        return jax.random.split(jax.random.key(0), 4)

    def _drawn(self, number: int, *leading: int) -> jax.Array:
        return jax.random.normal(self._seeds()[number], (*leading, self.dim), jnp.bfloat16)


CACHES = (
    Cache(1, 32768), Cache(16, 8192), Cache(64, 4096), Cache(256, 1024),
    Cache(16, 8192, kv_heads=32), Cache(16, 8192, kv_heads=1), Cache(16, 8192, dim=64),
    Cache(16, 8192, kv_heads=32, dim=64), Cache(16, 8192, kv_heads=1, dim=64),
    Cache(16, 8192, heads=16, kv_heads=4, dim=256),
)  # fmt: skip
PAGE_SIZES = (16, 64, 256)


def decode(cache: Cache) -> Programs:
    key, value = cache.arrays()
    query = {t: cache.query(cache.batch, t) for t in (1, 4, 8)}
    full, half = cache.lengths(cache.keys), cache.lengths(cache.keys // 2)
    ours = partial(dot_product_attention, implementation="cudnn", **BOTTOM_RIGHT)
    theirs = partial(jax.nn.dot_product_attention, implementation="cudnn")

    def with_lengths(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
        return ours(q, k, v, key_value_seq_lengths=n)

    def theirs_with_lengths(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
        ones = jnp.ones_like(n)
        return theirs(q, k, v, query_seq_lengths=ones, key_value_seq_lengths=n)

    found: Programs = {
        "whole cache": (ours, query[1], key, value),
        "lengths, full": (with_lengths, query[1], key, value, full),
        "lengths, half": (with_lengths, query[1], key, value, half),
        "4 queries": (with_lengths, query[4], key, value, full),
        "8 queries": (with_lengths, query[8], key, value, full),
        "jax.nn": (theirs, query[1], key, value),
        "jax.nn, lengths": (theirs_with_lengths, query[1], key, value, full),
    }
    paged = partial(paged_attention, implementation="cudnn")
    for size in PAGE_SIZES:
        pages = cache.pages(size)
        found[f"pages of {size}"] = (paged, query[1], *pages, full)
        if size == 64:
            found["pages of 64, half"] = (paged, query[1], *pages, half)
            found["pages of 64, 4 queries"] = (paged, query[4], *pages, full)
            found |= decode_peers.flash_attn3(query, (key, value), pages, full)
    return found


def _added(score: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
    return score + 0.1 * jnp.sin(0.01 * (s + n))


_PLAIN, _LONG, _MULTI_QUERY = Cache(16, 8192), Cache(16, 32768), Cache(16, 8192, kv_heads=1)
_SOFT_CAP = {"logits_soft_cap": 30.0}
OPTIONS: dict[str, tuple[Cache, int, dict[str, Any]]] = {
    "a chunk of 256": (_PLAIN, 256, {}),
    "a chunk of 256, soft cap": (_PLAIN, 256, _SOFT_CAP),
    "63 single queries, a chunk of 512": (Cache(64, 4096), 512, {"is_mix": True}),
    "soft cap": (_PLAIN, 1, _SOFT_CAP),
    "soft cap, one row": (Cache(1, 32768), 1, _SOFT_CAP),
    "soft cap, 4 queries": (_PLAIN, 4, _SOFT_CAP),
    "sinks": (_PLAIN, 1, {"has_sinks": True}),
    "window of 1024": (_LONG, 1, {"local_window_size": (1023, 0)}),
    "window of 10000": (_LONG, 1, {"local_window_size": (9999, 0)}),
    "window of 1024, a chunk of 256": (_LONG, 256, {"local_window_size": (1023, 0)}),
    "16 queries": (_PLAIN, 16, {}),
    "multi-query, 4 queries": (_MULTI_QUERY, 4, {}),
    "ALiBi": (_PLAIN, 1, {"has_slopes": True}),
    "ALiBi, 4 queries": (_PLAIN, 4, {"has_slopes": True}),
    "what a score_mod adds": (_PLAIN, 1, {"score_mod": _added}),
    "8 queries": (_PLAIN, 8, {}),
    "multi-query, 16 queries": (_MULTI_QUERY, 16, {}),
    "pages of 24": (Cache(16, 6144), 1, {"page": 24}),
}
"""By name: a cache, the number of queries, and options."""


def pages(
    cache: Cache, t: int, page: int = 64, is_mix: bool = False, has_sinks: bool = False,
    has_slopes: bool = False, **options: Any,
) -> Programs:  # fmt: skip
    query, lengths = cache.query(cache.batch, t), cache.lengths(cache.keys - 3)
    if is_mix:
        options["query_seq_lengths"] = jnp.ones(cache.batch, jnp.int32).at[-1].set(t)
    if has_sinks:
        options["sinks"] = jnp.zeros(cache.heads)
    if has_slopes:
        options["alibi_slopes"] = 2.0 ** -jnp.linspace(0.25, 8.0, cache.heads)
    options["implementation"] = "cudnn"

    def on_array(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, key_value_seq_lengths=n, **BOTTOM_RIGHT, **options)

    paged = (partial(paged_attention, **options), query, *cache.pages(page), lengths)
    return {"pages": paged, "gathered": paged, "array": (on_array, query, *cache.arrays(), lengths)}


ROWS: dict[str, tuple[Cache, tuple[int, ...]]] = {
    "63 single, a chunk of 512": (Cache(64, 4096), (1,) * 63 + (512,)),
    "255 single, a chunk of 512": (Cache(256, 1024), (1,) * 255 + (512,)),
    "15 single, a chunk of 2048": (Cache(16, 8192), (1,) * 15 + (2048,)),
    "60 single, 4 chunks of 256": (Cache(64, 4096), (1,) * 60 + (256,) * 4),
    "48 single, 15 of 4, a chunk of 512": (Cache(64, 4096), (1,) * 48 + (4,) * 15 + (512,)),
    "8 chunks of 256": (Cache(8, 4096), (256,) * 8),
    "63 single, a chunk of 512, MHA": (Cache(64, 4096, 16, 16, 64), (1,) * 63 + (512,)),
    "one chunk of 512": (Cache(1, 8192), (512,)),
}
"""By name: a cache, and the number of queries of each row."""


def ragged(cache: Cache, queries: tuple[int, ...]) -> Programs:
    tokens, longest = sum(queries), max(queries)
    query, lengths = cache.query(tokens), cache.lengths(cache.keys - 3)
    keys, values, table = cache.pages(64)
    cu = jnp.asarray(np.cumsum((0, *queries)), jnp.int32)
    plain = partial(paged_attention, implementation="cudnn")

    def packed(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array, n: jax.Array, cu: jax.Array):
        return plain(q, k, v, t, n, cu_seqlens_q=cu, max_seqlen_q=longest)

    whole = (packed, query, keys, values, table, lengths, cu)
    chunk = (plain, query[None, -longest:], keys, values, table[-1:], lengths[-1:])
    found: Programs = {"ragged": whole, "gathered": whole, "chunk": chunk}
    if tokens >= cache.batch:
        found["single"] = (plain, query[: cache.batch, None], keys, values, table, lengths)
    return found


@contextlib.contextmanager
def padded() -> Generator[None, None, None]:
    """Within this context, rows with different numbers of queries become a padded batch."""
    original = attn_dispatch.paged.fits_query_blocks
    attn_dispatch.paged.fits_query_blocks = lambda spec: False
    try:
        yield
    finally:
        attn_dispatch.paged.fits_query_blocks = original


def gathered() -> AbstractContextManager[Any]:
    """Within this context, calls begin with the rewrite that copies pages."""
    return restored(replace(current(), first_rewrite=PAGES_GATHERED.name))


def repeated(call: Call) -> Call:
    """A program that repeats the call, with each result as the next query; returns the last one."""

    def run(query: jax.Array, *others: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, q: call(q, *others), query)

    return jax.jit(run)


def copied(x: jax.Array) -> jax.Array:
    """The same number of copies, one after the other."""
    for _ in range(STEPS - 1):
        _COPY(x)
    return _COPY(x)


_COPY = jax.jit(lambda x: x + 1)


def measured(
    programs: Programs,
    rounds: int,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, dict[str, float]]:
    """By program, a step's wall and device time in microseconds.

    Args:
      within: the context in which the program "gathered" is traced and run.
    """
    runs = {x: call if call is copied else repeated(call) for x, (call, *_) in programs.items()}
    contexts = {name: within if name == "gathered" else nullcontext for name in programs}

    def run(name: str) -> None:
        with contexts[name]():
            jax.block_until_ready(runs[name](*programs[name][1:]))

    for name in programs:
        run(name)
    wall: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name in programs:
            started = time.perf_counter()
            run(name)
            wall[name].append(1e6 * (time.perf_counter() - started) / STEPS)
    found = {name: {"us": statistics.median(x)} for name, x in wall.items()}
    for name, row in found.items():
        busy = [device_us(partial(run, name)) for _ in range(PROFILES)]
        if known := [x for x in busy if x is not None]:
            row["device_us"] = statistics.median(known) / STEPS
    return found


def main() -> None:
    script = Script("decode", __doc__, rounds=7)
    script.parser.add_argument("--part", choices=("decode", "pages", "ragged"), default="decode")
    script.parser.add_argument("--without-torch", action="store_true")
    args = script.start()
    if args.part == "pages":
        for name in script.chosen(OPTIONS):
            cache, t, options = OPTIONS[name]
            row = measured(pages(cache, t, **options), args.rounds, gathered)
            script.keep("pages", name, {"cache": str(cache), "queries": t, **row})
    elif args.part == "ragged":
        for name in script.chosen(ROWS):
            cache, queries = ROWS[name]
            row = measured(ragged(cache, queries), args.rounds, padded)
            script.keep("ragged", name, {"cache": str(cache), **row})
    else:
        torch = None if args.without_torch else decode_peers.Torch()
        by_name = {str(x): x for x in CACHES}
        for name in script.chosen(by_name):
            cache = by_name[name]
            programs = decode(cache) | {"copy": (copied, cache.arrays()[0])}
            row: dict[str, Any] = measured(programs, args.rounds)
            script.keep("decode", name, row | (torch.times(cache, args.rounds) if torch else {}))
        if torch is not None:
            torch.close()


if __name__ == "__main__":
    main()
