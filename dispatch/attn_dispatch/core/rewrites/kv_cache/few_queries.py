"""A few queries of each row on a cache, as heads of a single query, for kernels made for decoding.

Such a kernel has the query heads of a kv head as rows of one tile, so that additional heads cost
little, and splits the keys of a row among multiprocessors. The kernel attends to the keys that all
queries of a row see. Under causality up to T - 1 keys remain, which only later queries see. They
are copied, and XLA attends to them. The two results are merged by lse.

With 4 queries per row (32 heads on 8) an H200 takes 1.0 to 1.2 times as long as with one query, and
with 8 up to 1.5 times (benchmarks/decode.py); cuDNN's kernel for several queries takes 3.4 to 8
times as long.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.kv_cache.merged_keys import results_of, with_keys_merged
from attn_dispatch.core.rewrites.rewrite import (
    CACHE,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    without_band,
)
from attn_dispatch.semantics.given_ids import row_lengths

MAX_QUERIES = 16
"""The most queries of a row. For 16 queries an H200 takes 352 µs as heads, and 597 µs with a kernel
for several queries (16 rows of 8,192 keys, 32 heads on 8, 128 dims)."""

_REFUSED = ("mask", "window", "alibi_slopes", "sinks", "dropout_key")
"""Operands with which the rewrite does not apply: those that treat the queries of a row
differently, and sinks, which need the merged lse."""


def _when(spec: AttentionSpec) -> bool:
    if not 1 < spec.seq_len_q <= MAX_QUERIES or spec.is_packed:
        return False
    if not spec.has("key_value_seq_lengths") or any(map(spec.has, _REFUSED)):
        return False
    if spec.meaning.mods or spec.wanted.needs_max or spec.wanted.needs_keep or spec.is_empty:
        return False
    is_whole = spec.promises.whole_pages and spec.band == (None, None)
    return is_whole or is_plain(spec)


def _inner(spec: AttentionSpec) -> AttentionSpec:
    heads = spec.num_heads * spec.seq_len_q
    arrays = {"query": ((spec.batch, 1, heads, spec.head_dim), spec.dtype)}
    if spec.has("bias"):
        batch, *_, keys = spec.shape("bias")
        arrays["bias"] = (batch, heads, 1, keys), spec.dtype_of("bias")
    return changed(
        spec,
        arrays=arrays,
        meaning=without_band(spec.meaning),
        wanted=replace(spec.wanted, needs_lse=True),
        promises=replace(spec.promises, is_checked=True, ignores_padding_rows=True),
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    queries, keys = (row_lengths(spec, operands, side) for side in ("query", "key"))
    is_causal = spec.band == (None, 0)
    seen_by_all = keys
    if is_causal:
        seen_by_all = jnp.where(queries > 0, jnp.maximum(keys - queries + 1, 0), 0)
    given = dict(operands)
    given["query"] = _as_heads(spec, operands["query"])
    if spec.has("bias"):
        given["bias"] = _bias_of_heads(spec, operands["bias"])
    given["key_value_seq_lengths"] = seen_by_all
    if spec.has("query_seq_lengths"):
        given["query_seq_lengths"] = jnp.minimum(queries, 1)
    results = calls.kernel(for_(inner, given))
    out = _from_heads(spec, results["out"][:, 0])
    lse = _from_heads(spec, results["lse"][..., 0])
    t = jnp.arange(spec.seq_len_q, dtype=jnp.int32)[None]
    if is_causal:
        end = jnp.minimum((keys - queries)[:, None] + t + 1, keys[:, None])
        places = seen_by_all[:, None] + jnp.arange(spec.seq_len_q - 1, dtype=jnp.int32)[None]
        is_seen = places[:, None] < end[..., None]
        out, lse = with_keys_merged(spec, operands, (out, lse), places, is_seen)
    return results_of(spec, operands, out, lse, t < queries[:, None])


def is_plain(spec: AttentionSpec) -> bool:
    """Whether the call, if it has no operand of `_REFUSED`, has plain scores.

    Plain scores are scale · q · k, at most with a causal mask from the bottom right: they have
    neither a soft cap nor a bias.
    """
    is_causal = spec.band == (None, 0) and spec.meaning.causal_alignment == "bottom_right"
    if spec.meaning.logits_soft_cap is not None or spec.has("bias"):
        return False
    return is_causal or spec.band == (None, None)


def _as_heads(spec: AttentionSpec, query: jax.Array) -> jax.Array:
    """[B, T, N, H] as [B, 1, N · T, H], with the new heads of each kv head together."""
    x = query.reshape(spec.batch, spec.seq_len_q, spec.num_kv_heads, -1, spec.head_dim)
    return jnp.moveaxis(x, 1, 3).reshape(spec.batch, 1, -1, spec.head_dim)


def _bias_of_heads(spec: AttentionSpec, bias: jax.Array) -> jax.Array:
    """[1|B, 1|N, 1|T, S] as [1|B, N · T, 1, S]."""
    batch, keys = bias.shape[0], bias.shape[3]
    x = jnp.broadcast_to(bias, (batch, spec.num_heads, spec.seq_len_q, keys))
    return x.reshape(batch, -1, 1, keys)


def _from_heads(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """[B, N · T, ...] as [B, T, N, ...]."""
    x = x.reshape(spec.batch, spec.num_kv_heads, -1, spec.seq_len_q, *x.shape[2:])
    return jnp.moveaxis(x, 3, 1).reshape(spec.batch, spec.seq_len_q, spec.num_heads, *x.shape[4:])


QUERIES_AS_HEADS = Rewrite(
    "few queries: as heads of a single one, the last keys apart",
    _inner,
    _compute,
    asked_of=CACHE,
    when=_when,
)
