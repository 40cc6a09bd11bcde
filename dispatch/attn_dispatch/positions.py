"""Where queries and keys stand: what lengths, segments and alignment say before any pair is formed.

Everything here is [B, T] or [B, S], never [T, S]: it is computed once per call, and `masks.py`
forms pairs from a few rows of it at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.packing import sequence_of
from attn_dispatch.spec import AttentionSpec


@dataclass(frozen=True)
class Positions:
    """Segment ids and positions of all queries and keys; int32, None where nothing needs them.

    A batch axis of 1 stands for "the same in every batch row".
    """

    query_ids: jax.Array | None
    """[B, T]; below 1 is padding. Lengths without segments make one segment, with id 1."""
    key_ids: jax.Array | None
    """[B, S]."""
    diagonal: jax.Array | None
    """[1|B, T]; i + offset: the key position that query i of its segment lines up with."""
    key_positions: jax.Array | None
    """[1|B, S]; position of the key inside its segment."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Positions:
        """The positions of a call, from its lengths, segment ids and causal alignment."""
        query_ids, key_ids = _ids(spec, operands)
        if not _needs_positions(spec):
            return Positions(query_ids, key_ids, None, None)
        if query_ids is not None and key_ids is not None and _has_segments(spec):
            return _inside_segments(spec, query_ids, key_ids)
        query_length, key_length = _length(spec, operands, "query"), _length(spec, operands, "key")
        diagonal = _iota(spec.seq_len_q)
        if spec.options.causal_alignment == "bottom_right":
            diagonal = diagonal + (key_length - query_length)
        return Positions(query_ids, key_ids, diagonal, _iota(spec.seq_len_kv))

    def rows(self, start: jax.Array | int, size: int) -> Positions:
        """The same with the queries start … start + size - 1 alone."""

        def take(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=1)

        return Positions(
            take(self.query_ids), self.key_ids, take(self.diagonal), self.key_positions
        )

    def distance(self) -> jax.Array:
        """|i + offset - j| as ALiBi takes it, int32 [1|B, 1, T, S]: for few rows at a time."""
        assert self.diagonal is not None and self.key_positions is not None
        return jnp.abs(self.diagonal[:, None, :, None] - self.key_positions[:, None, None, :])


def _needs_positions(spec: AttentionSpec) -> bool:
    o = spec.options
    return o.is_causal or o.window != (None, None) or spec.has("alibi_slopes")


def _has_segments(spec: AttentionSpec) -> bool:
    return spec.has("query_segment_ids") or spec.has("cu_seqlens_q")


def _iota(length: int) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32)[None, :]


def _length(spec: AttentionSpec, operands: Mapping[str, jax.Array], side: str) -> jax.Array:
    """The actual lengths, clamped, int32 [1|B, 1]."""
    full = spec.seq_len_q if side == "query" else spec.seq_len_kv
    name = "query_seq_lengths" if side == "query" else "key_value_seq_lengths"
    if not spec.has(name):
        return jnp.full((1, 1), full, jnp.int32)
    return jnp.clip(operands[name], 0, full).astype(jnp.int32)[:, None]


def _ids(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids with everything past a length made padding; (None, None) where no padding is."""
    if spec.has("cu_seqlens_q"):
        return (
            sequence_of(operands["cu_seqlens_q"], spec.seq_len_q),
            sequence_of(operands["cu_seqlens_kv"], spec.seq_len_kv),
        )
    has_segments = spec.has("query_segment_ids")
    has_lengths = spec.has("query_seq_lengths") or spec.has("key_value_seq_lengths")
    if not has_segments and not has_lengths:
        return None, None

    def ids(side: str, name: str, length: int) -> jax.Array:
        given = operands[name] if has_segments else jnp.int32(1)
        inside = _iota(length) < _length(spec, operands, side)
        return jnp.broadcast_to(jnp.where(inside, given, 0), (spec.batch, length))

    return (
        ids("query", "query_segment_ids", spec.seq_len_q),
        ids("key", "key_value_segment_ids", spec.seq_len_kv),
    )


def _inside_segments(spec: AttentionSpec, query_ids: jax.Array, key_ids: jax.Array) -> Positions:
    """Positions counted inside each segment, and each segment's own bottom-right offset."""
    queries, keys = _Runs.of(query_ids), _Runs.of(key_ids)
    first_query, num_queries = queries.find(query_ids)
    first_key, _ = keys.find(key_ids)
    diagonal = queries.real_before[:, :-1] - first_query
    if spec.options.causal_alignment == "bottom_right":
        _, num_keys = keys.find(query_ids)
        diagonal = diagonal + (num_keys - num_queries)
    return Positions(query_ids, key_ids, diagonal, keys.real_before[:, :-1] - first_key)


@dataclass(frozen=True)
class _Runs:
    """Ascending segment ids made searchable, whatever padding stands between them."""

    ascending: jax.Array
    """int32 [B, L]; the ids, each padding repeating the id before it."""
    real_before: jax.Array
    """int32 [B, L + 1]; how many of the first l positions are not padding."""

    @staticmethod
    def of(ids: jax.Array) -> _Runs:
        ids = jnp.maximum(ids, 0)
        counted = jnp.cumsum(ids > 0, axis=1, dtype=jnp.int32)
        return _Runs(lax.cummax(ids, axis=1), jnp.pad(counted, ((0, 0), (1, 0))))

    def find(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each id [B, M]: how many real positions come before its segment, and are in it."""

        def before(side: str) -> jax.Array:
            index = jax.vmap(lambda a, v: jnp.searchsorted(a, v, side=side))(self.ascending, ids)
            return jnp.take_along_axis(self.real_before, index, axis=1)

        first = before("left")
        return first, before("right") - first
