"""The range of keys that lengths, sequences, causality and windows leave to each query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.diagonal import Numbers, diagonal_of
from attn_dispatch.semantics.given_ids import pick, row_lengths
from attn_dispatch.semantics.interval_union import Range
from attn_dispatch.semantics.packing import SequenceRanges
from attn_dispatch.semantics.ranks import Ranks
from attn_dispatch.semantics.row_ids import RowIds, search
from attn_dispatch.semantics.segment_runs import SegmentRuns


@dataclass(frozen=True)
class KeySpans:
    """Each query's position, and the keys of its sequence that its band leaves.

    Positions count inside the sequence, and so do `first` and `end`: its first key is key `start`
    of the batch row.
    """

    position: jax.Array
    """int32 [1|B, T]."""
    start: Numbers
    first: Numbers
    """At least 0."""
    end: Numbers
    """At most the sequence's number of keys; not above `first` where the query sees nothing."""
    query_ids: jax.Array | None = None
    """[B, T], the sequence of each query, counted from 1, if there are several."""
    is_scattered: jax.Array | None = None
    """bool scalar: the keys of some query's sequence are not neighbours. None: they surely are."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> KeySpans:
        """The spans of a call, which has no pages."""
        queries = _Queries.of(spec, operands)
        first, end = _band(spec, operands, queries)
        first = _larger(first, 0)
        end = _smaller(end, queries.keys)
        if queries.is_real is not None:
            end = jnp.where(queries.is_real, end, 0)
        return KeySpans(
            queries.position, queries.start, first, end, queries.ids, queries.is_scattered
        )

    def within(self, first: Numbers | None, end: Numbers | None) -> Range:
        """The keys first <= s < end of the span, which count inside the sequence, as places of the
        batch row."""
        begin = self.first if first is None else _larger(self.first, first)
        stop = _larger(self.end if end is None else _smaller(self.end, end), 0)
        # Only an empty range can begin after its end, or reach over the end of the array.
        begin = _smaller(begin, stop)
        return self._place(begin), self._place(stop)

    def _place(self, key: Numbers) -> jax.Array:
        place = key if isinstance(self.start, int) and self.start == 0 else key + self.start
        return jnp.full((1, 1), place, jnp.int32) if isinstance(place, int) else place


@dataclass(frozen=True)
class _Queries:
    """Each query's position in its sequence, and the sequence's keys."""

    position: jax.Array
    start: Numbers
    keys: Numbers
    """The number of keys of the query's sequence."""
    offset: Numbers
    """The number of keys minus the number of queries."""
    is_real: jax.Array | None = None
    """bool: the query belongs to a sequence; None if all do."""
    ids: jax.Array | None = None
    is_scattered: jax.Array | None = None

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> _Queries:
        if spec.is_packed and spec.most_sequences is None:
            return _in_any_order(spec, operands)
        if spec.is_packed:
            return _packed(spec, operands)
        position = _iota(spec.seq_len_q)
        if not (spec.has_lengths or spec.has("window")):
            return _Queries(position, 0, spec.seq_len_kv, spec.seq_len_kv - spec.seq_len_q)
        # A negative side of a window makes its batch row invalid, and its lengths 0.
        queries, keys = (row_lengths(spec, operands, x)[:, None] for x in ("query", "key"))
        return _Queries(position, 0, keys, keys - queries, position < queries)


def _packed(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> _Queries:
    if spec.has("query_segment_ids"):
        runs = SegmentRuns.of(spec, operands)
        ids, (starts, key_starts), (lengths, key_lengths) = (
            runs.ids.query,
            runs.starts,
            runs.lengths,
        )
        index = ids
    else:
        ranges = SequenceRanges.of(spec, operands)
        ids, index = ranges.sequence_of_query, jnp.maximum(ranges.sequence_of_query - 1, 0)
        starts, key_starts = ranges.starts_q, ranges.starts_kv
        lengths, key_lengths = ranges.lengths_q, ranges.lengths_kv
    keys = pick(key_lengths, index)
    return _Queries(
        _iota(spec.seq_len_q) - pick(starts, index),
        pick(key_starts, index),
        keys,
        keys - pick(lengths, index),
        ids > 0,
        ids,
    )


def _in_any_order(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> _Queries:
    """With segment ids of which no largest one is known, equal ids are a segment."""
    found = RowIds.of(spec, operands)
    ids = found.query
    queries, keys = Ranks.of(ids), EqualRuns.of(found.key)
    first, last, count = keys.find(ids)
    is_real = (ids > 0) & (count > 0)
    is_scattered = (is_real & (last - first + 1 != count)).any()
    offset = count - queries.count(ids)
    return _Queries(queries.positions(ids), first, count, offset, ids > 0, ids, is_scattered)


@dataclass(frozen=True)
class EqualRuns:
    """The places of equal values in rows of values, found by sorting them."""

    order: jax.Array
    """int32 [B, L]: the places in the order of their values."""
    ascending: jax.Array
    """[B, L]: the values in this order."""

    @staticmethod
    def of(values: jax.Array) -> EqualRuns:
        order = jnp.argsort(values, axis=1, stable=True).astype(jnp.int32)
        return EqualRuns(order, jnp.take_along_axis(values, order, axis=1))

    def find(self, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For each wanted value [B, M]: its first and its last place, and how many it has.

        Of a value with none, the places are unspecified, but inside the row.
        """
        left, right = (
            search(self.ascending, wanted, "left"),
            search(self.ascending, wanted, "right"),
        )
        length = self.order.shape[1]

        def place(index: jax.Array) -> jax.Array:
            return jnp.take_along_axis(self.order, jnp.clip(index, 0, length - 1), axis=1)

        found = place(left), place(right - 1), right - left
        # XLA would merge the search with each use of its results, and repeat it there.
        return lax.optimization_barrier(found)


def _band(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], queries: _Queries
) -> tuple[Numbers, Numbers]:
    """The keys first <= s < end of the band around the diagonal, before any limits."""
    diagonal = diagonal_of(spec, operands, queries.position, lambda: queries.offset)
    left, right = spec.band
    first = 0 if left is None else diagonal - left
    end = queries.keys if right is None else diagonal + (right + 1)
    if spec.has("window"):
        # The cut, which changes nothing, keeps sums in int32.
        sides = jnp.minimum(operands["window"], spec.widest_side)
        first = jnp.maximum(first, diagonal - sides[:, :1])
        end = jnp.minimum(end, diagonal + sides[:, 1:] + 1)
    return first, end


def _iota(length: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (1, length), 1)


def _larger(x: Numbers, y: Numbers) -> Numbers:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def _smaller(x: Numbers, y: Numbers) -> Numbers:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)
