"""Positions of queries and keys, from lengths, segments and causal alignment.

All arrays here are [B, T] or [B, S], never [T, S]: they are computed once per call, and `masks.py`
forms the pairs of a block from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.diagonal import Numbers, diagonal_of
from attn_dispatch.semantics.given_ids import iota, row_lengths
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.semantics.row_ids import RowIds, search


@dataclass(frozen=True)
class Positions:
    """Segment ids and positions of all queries and keys, int32; None where nothing needs them.

    A batch axis of 1 stands for "the same in every batch row".
    """

    query_ids: jax.Array | None
    """[B, T]: the segment id; 0 for padding and invalid rows. Lengths alone make one segment, 1."""
    key_ids: jax.Array | None
    """[B, S]."""
    diagonal: jax.Array | None
    """[1|B, T]: i + offset, the key position that query i of its segment lines up with."""
    key_positions: jax.Array | None
    """[1|B, S]: the key's position inside its segment."""
    indices: PairIndices | None = None
    """The indices that score_mod and mask_mod are called with."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Positions:
        """The positions of a call, from its lengths, segment ids and causal alignment."""
        query_ids, key_ids = _ids(spec, operands)
        if not _needs_positions(spec):
            return Positions(query_ids, key_ids, None, None)
        if query_ids is not None and key_ids is not None and spec.is_packed:
            return _inside_segments(spec, operands, query_ids, key_ids)
        diagonal, keys = iota(spec.seq_len_q), iota(spec.seq_len_kv)
        indices = PairIndices.of(spec, operands, diagonal, keys)
        diagonal = diagonal_of(spec, operands, diagonal, lambda: _more_keys(spec, operands))
        return Positions(query_ids, key_ids, diagonal, keys, indices)

    def part(self, take: Callable[[jax.Array, str], jax.Array]) -> Positions:
        """The positions of one block; take(x, axes) cuts an array, with axes "bt" or "bs"."""

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
        """ALiBi's |i + offset - j|, int32 [1|B, 1, T, S]; meant for a block of few rows."""
        assert self.diagonal is not None and self.key_positions is not None
        return jnp.abs(self.diagonal[:, None, :, None] - self.key_positions[:, None, None, :])


def _more_keys(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Numbers:
    """The number of keys of each batch row minus that of its queries."""
    if not spec.has_lengths:
        return spec.seq_len_kv - spec.seq_len_q
    query_length, key_length = (row_lengths(spec, operands, x) for x in ("query", "key"))
    return (key_length - query_length)[:, None]


def _needs_positions(spec: AttentionSpec) -> bool:
    return spec.has_diagonal or spec.has("mods_start")


def _ids(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids, 0 in padding; (None, None) if the call has no padding."""
    # A traced window may be invalid, which makes its batch row padding.
    if not (spec.has_runtime_lengths or spec.has("window")):
        return None, None
    ids = RowIds.of(spec, operands)
    return ids.query, ids.key


def _inside_segments(
    spec: AttentionSpec,
    operands: Mapping[str, jax.Array],
    query_ids: jax.Array,
    key_ids: jax.Array,
) -> Positions:
    """Positions counted inside each segment, with the bottom-right offset of each segment."""
    is_any_order = spec.has("query_segment_ids") and spec.meaning.max_segments is None
    of = _IdRanks.of if is_any_order else _IdRuns.of
    queries, keys = of(query_ids), of(key_ids)
    diagonal, key_positions = queries.positions(query_ids), keys.positions(key_ids)
    indices = PairIndices.of(spec, operands, diagonal, key_positions, query_ids)
    diagonal = diagonal_of(
        spec, operands, diagonal, lambda: keys.count(query_ids) - queries.count(query_ids)
    )
    return Positions(query_ids, key_ids, diagonal, key_positions, indices)


@dataclass(frozen=True)
class _IdRuns:
    """Rows of ids whose places are one run for each id (see `RowIds`), to be searched."""

    ascending: jax.Array
    """int32 [B, L]: the ids, where padding repeats the id before it."""
    real_before: jax.Array
    """int32 [B, L + 1]: how many of the first l places are not padding."""

    @staticmethod
    def of(ids: jax.Array) -> _IdRuns:
        counted = jnp.cumsum(ids > 0, axis=1, dtype=jnp.int32)
        return _IdRuns(lax.cummax(ids, axis=1), jnp.pad(counted, ((0, 0), (1, 0))))

    def find(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each id [B, M]: where its run starts, and how long it is (0 where there is none)."""

        def index(side: str) -> jax.Array:
            return search(self.ascending, ids, side)

        def before(index: jax.Array) -> jax.Array:
            return jnp.take_along_axis(self.real_before, index, axis=1, mode="promise_in_bounds")

        first, end = index("left"), index("right")
        return first, before(end) - before(first)

    def positions(self, ids: jax.Array) -> jax.Array:
        """int32 [B, L]: each place's position in its run. `ids` are the same as in `of`."""
        return iota(ids.shape[1]) - self.find(ids)[0]

    def count(self, ids: jax.Array) -> jax.Array:
        """The number of places of each id [B, M]."""
        return self.find(ids)[1]


@dataclass(frozen=True)
class _IdRanks:
    """Rows of ids whose places may stand in any order, sorted."""

    ascending: jax.Array
    """int32 [B, L]: the sorted ids."""
    rank: jax.Array
    """int32 [B, L]: where sorting puts each place; equal ids keep their order."""

    @staticmethod
    def of(ids: jax.Array) -> _IdRanks:
        order = jnp.argsort(ids, axis=1, stable=True)
        rank = jnp.argsort(order, axis=1).astype(jnp.int32)
        return _IdRanks(jnp.take_along_axis(ids, order, axis=1), rank)

    def positions(self, ids: jax.Array) -> jax.Array:
        """int32 [B, L]: how many earlier places have the same id. `ids` are the same as in `of`."""
        return self.rank - search(self.ascending, ids, "left")

    def count(self, ids: jax.Array) -> jax.Array:
        """The number of places of each id [B, M]."""
        return search(self.ascending, ids, "right") - search(self.ascending, ids, "left")
