"""Calls on whole pages with the query heads of a kv head as more queries of it, and keys in parts.

A kernel for several queries has tiles of 128 queries of one query head, and reads the keys once for
each tile. On whole pages all queries see all keys, so queries of all heads of a group can share a
tile. Such a kernel does not divide keys among multiprocessors. If there are fewer tiles than
multiprocessors, the pages of a row are divided into parts, each a batch row of the inner call, and
the results of the parts are merged by lse.

4 queries of 32 heads on one kv head take 63 µs this way, with keys in 8 parts, and 161 µs as heads
of a single query (16 rows of 8,192 keys, 128 dims, H200, cuDNN 9.19); 16 queries of 32 heads on 8
take 183 and 353 µs.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import PAGES, Calls, NamedArrays, Rewrite, changed, for_
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.merge import merged_parts

_REFUSED = ("bias", "mask", "window", "alibi_slopes", "sinks", "dropout_key")

MOST_AS_HEADS = 32
"""The most queries times heads of a group for which a kernel for decoding is faster. Its tiles have
16 rows. 8 queries of 32 heads on 8 take 172 µs as heads of one query, and 196 µs with this rewrite
(16 rows of 8,192 keys)."""

_TILE = 128
"""Rows of a kernel's tile. This many queries fill it without grouping heads."""
PART = 256
"""A page table, and each part of one, has room for a multiple of this many keys. Kernels read it in
tiles of 128 keys, even past its end, and then read whatever page the number there names (H200,
cuDNN 9.19: NaN if a row's table had 5 pages of 64, but none if it had 3 pages of 128)."""
_ENOUGH = 128
"""The number of tiles that keeps a GPU busy; an H200 and an H100 have 132 multiprocessors."""


def _when(spec: AttentionSpec) -> bool:
    if (
        not spec.promises.whole_pages
        or spec.band != (None, None)
        or spec.seq_len_q == 1
        or spec.meaning.mods
    ):
        return False
    if spec.wanted.needs_max or spec.wanted.needs_keep or any(map(spec.has, _REFUSED)):
        return False
    if spec.seq_len_q * _group(spec) <= MOST_AS_HEADS or spec.seq_len_q >= _TILE:
        return False
    return not _group(spec) == _parts(spec) == 1


def _inner(spec: AttentionSpec) -> AttentionSpec:
    parts = _parts(spec)
    sizes = {
        "b": spec.batch * parts,
        "t": spec.seq_len_q * _group(spec),
        "n": spec.num_kv_heads,
        "m": spec.shape("page_table")[1] // parts,
    }
    wanted = replace(spec.wanted, needs_lse=True)
    return changed(spec, sizes=sizes, wanted=wanted, same_lengths=False)


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    b, t, k = spec.batch, spec.seq_len_q, spec.num_kv_heads
    group, parts = _group(spec), _parts(spec)
    query = jnp.swapaxes(operands["query"].reshape(b, t, k, group, spec.head_dim), 2, 3)
    query = query.reshape(b, t * group, k, spec.head_dim)
    room = spec.seq_len_kv // parts
    begin = room * jnp.arange(parts, dtype=jnp.int32)
    lengths = jnp.clip(operands["key_value_seq_lengths"][:, None] - begin, 0, room)
    given = {
        **operands,
        "query": jnp.repeat(query, parts, axis=0),
        "page_table": operands["page_table"].reshape(inner.shape("page_table")),
        "key_value_seq_lengths": lengths.reshape(-1),
    }
    if spec.has("query_seq_lengths"):
        queries = group * operands["query_seq_lengths"]
        given["query_seq_lengths"] = jnp.repeat(queries, parts, axis=0)
    results = calls.kernel(for_(inner, given))
    out = results["out"].reshape(b, parts, t * group, k, -1)
    lse = jnp.swapaxes(results["lse"], 1, 2).reshape(b, parts, t * group, k)
    # The kernel's results for a part without keys are unspecified.
    lse = jnp.where((lengths > 0)[..., None, None], lse, -jnp.inf)
    out, lse = merged_parts(out, lse) if parts > 1 else (out[:, 0], lse[:, 0])

    def back(x: jax.Array) -> jax.Array:
        """[B, T · group, K, ...] as [B, T, N, ...]."""
        x = jnp.swapaxes(x.reshape(b, t, group, k, *x.shape[3:]), 2, 3)
        return x.reshape(b, t, spec.num_heads, *x.shape[4:])

    found = {"out": back(out).astype(spec.dtype), "lse": jnp.swapaxes(back(lse), 1, 2)}
    return nan_where_invalid(spec, operands, found)


def _group(spec: AttentionSpec) -> int:
    return spec.num_heads // spec.num_kv_heads


def _parts(spec: AttentionSpec) -> int:
    """The number of parts of each row's table: the smallest power of two that makes _ENOUGH tiles,
    or less if the table cannot be divided into so many parts."""
    tiles = spec.batch * spec.num_kv_heads * -(-spec.seq_len_q * _group(spec) // _TILE)
    columns, parts = spec.shape("page_table")[1], 1
    while tiles * parts < _ENOUGH and columns * spec.page_size % (2 * parts * PART) == 0:
        parts *= 2
    return parts


HEADS_AS_QUERIES = Rewrite(
    "whole pages: the heads of a group as queries of one, keys in parts",
    _inner,
    _compute,
    asked_of=PAGES,
    when=_when,
)
