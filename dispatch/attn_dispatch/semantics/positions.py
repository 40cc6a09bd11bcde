"""Where queries and keys stand: what lengths, segments and alignment say before any pair is formed.

Everything here is [B, T] or [B, S], never [T, S]: it is computed once per call, and `masks.py`
forms pairs from a part of it at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.packing import Runs
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.semantics.ranks import Ranks
from attn_dispatch.semantics.row_ids import RowIds, is_packed, row_lengths


@dataclass(frozen=True)
class Positions:
    """Segment ids and positions of all queries and keys; int32, None where nothing needs them.

    A batch axis of 1 stands for "the same in every batch row".
    """

    query_ids: jax.Array | None
    """[B, T]; 0 is padding, and what is wrong. Lengths without segments make one, with id 1."""
    key_ids: jax.Array | None
    """[B, S]."""
    diagonal: jax.Array | None
    """[1|B, T]; i + offset: the key position that query i of its segment lines up with."""
    key_positions: jax.Array | None
    """[1|B, S]; position of the key inside its segment."""
    indices: PairIndices | None = None
    """What score_mod and mask_mod are told of a pair."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Positions:
        """The positions of a call, from its lengths, segment ids and causal alignment."""
        query_ids, key_ids = _ids(spec, operands)
        if not _needs_positions(spec):
            return Positions(query_ids, key_ids, None, None)
        if query_ids is not None and key_ids is not None and is_packed(spec):
            return _inside_segments(spec, operands, query_ids, key_ids)
        diagonal, keys = _iota(spec.seq_len_q), _iota(spec.seq_len_kv)
        indices = PairIndices.of(spec, operands, diagonal, keys)
        if spec.meaning.causal_alignment == "bottom_right" and _has_lengths(spec):
            query_length, key_length = (row_lengths(spec, operands, x) for x in ("query", "key"))
            diagonal = diagonal + (key_length - query_length)[:, None]
        elif spec.meaning.causal_alignment == "bottom_right":
            diagonal = diagonal + (spec.seq_len_kv - spec.seq_len_q)
        return Positions(query_ids, key_ids, diagonal, keys, indices)

    def part(self, take: Callable[[jax.Array, str], jax.Array]) -> Positions:
        """The same of some batch rows and queries: take(x, axes), axes being "bt" or "bs"."""

        def part(x: jax.Array | None, axes: str) -> jax.Array | None:
            return None if x is None else take(x, axes)

        return Positions(
            part(self.query_ids, "bt"),
            part(self.key_ids, "bs"),
            part(self.diagonal, "bt"),
            part(self.key_positions, "bs"),
            None if self.indices is None else self.indices.part(take),
        )

    def distance(self) -> jax.Array:
        """|i + offset - j| as ALiBi takes it, int32 [1|B, 1, T, S]: for few rows at a time."""
        assert self.diagonal is not None and self.key_positions is not None
        return jnp.abs(self.diagonal[:, None, :, None] - self.key_positions[:, None, None, :])


def _needs_positions(spec: AttentionSpec) -> bool:
    has_distances = spec.has("alibi_slopes") or spec.has("window")
    return spec.band != (None, None) or has_distances or spec.has("mods_start")


def _has_lengths(spec: AttentionSpec) -> bool:
    return spec.has("query_seq_lengths") or spec.has("key_value_seq_lengths")


def _iota(length: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (1, length), 1)


def _ids(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids with all padding made 0; (None, None) where there is none."""
    # A traced window may be wrong, and its batch row is padding then.
    if not (is_packed(spec) or _has_lengths(spec) or spec.has("window")):
        return None, None
    ids = RowIds.of(spec, operands)
    return ids.query, ids.key


def _inside_segments(
    spec: AttentionSpec,
    operands: Mapping[str, jax.Array],
    query_ids: jax.Array,
    key_ids: jax.Array,
) -> Positions:
    """Positions counted inside each segment, and each segment's own bottom-right offset."""
    is_any_order = spec.has("query_segment_ids") and spec.meaning.max_segments is None
    of = Ranks.of if is_any_order else Runs.of
    queries, keys = of(query_ids), of(key_ids)
    diagonal, key_positions = queries.positions(query_ids), keys.positions(key_ids)
    indices = PairIndices.of(spec, operands, diagonal, key_positions, query_ids)
    if spec.meaning.causal_alignment == "bottom_right":
        diagonal = diagonal + (keys.count(query_ids) - queries.count(query_ids))
    return Positions(query_ids, key_ids, diagonal, key_positions, indices)
