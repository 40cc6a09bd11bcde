"""The query heads of a kv head as more queries of it, where nothing tells queries apart.

A kernel for several queries has tiles of 128 of them, each of one query head, and reads keys for
each tile. Of whole pages all queries see all keys, so that the queries of all heads of a group may
stand in one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.cache.few_queries import MOST
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, changed, for_
from attn_dispatch.semantics.wrong import marked

_BY_HEAD = ("bias", "mask", "window", "alibi_slopes", "sinks", "dropout_key")

MOST_ROWS = 512


@dataclass(frozen=True)
class HeadsAsQueries:
    name: str = "whole pages: the heads of a group as queries of one"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        o, group = spec.options, _group(spec)
        if not o.whole_pages or spec.band != (None, None) or spec.seq_len_q <= MOST or o.mods:
            return None
        if group == 1 or spec.seq_len_q * group > MOST_ROWS or any(map(spec.has, _BY_HEAD)):
            return None
        rows = (spec.batch, spec.seq_len_q * group, spec.num_kv_heads, spec.head_dim)
        return changed(spec, arrays={"query": (rows, spec.dtype)})

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner, group = self.inner(spec), _group(spec)
        assert inner is not None
        b, t, k = spec.batch, spec.seq_len_q, spec.num_kv_heads
        query = operands["query"].reshape(b, t, k, group, spec.head_dim)
        given = {**operands, "query": jnp.swapaxes(query, 2, 3).reshape(inner.shape("query"))}
        if spec.has("query_seq_lengths"):
            given["query_seq_lengths"] = operands["query_seq_lengths"] * group
        results = calls.kernel(inner, for_(inner, given))

        def back(x: jax.Array) -> jax.Array:
            """[B, T · group, K, ...] as [B, T, N, ...]."""
            x = jnp.swapaxes(x.reshape(b, t, group, k, *x.shape[3:]), 2, 3)
            return x.reshape(b, t, spec.num_heads, *x.shape[4:])

        found = {"out": back(results["out"])}
        if "lse" in results:
            lse = jnp.swapaxes(results["lse"], 1, 2)
            found["lse"] = jnp.swapaxes(back(lse), 1, 2)
        return marked(spec, operands, found)


def _group(spec: AttentionSpec) -> int:
    return spec.num_heads // spec.num_kv_heads
