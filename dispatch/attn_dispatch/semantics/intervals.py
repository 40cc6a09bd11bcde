"""The mask of a call as intervals: at most two ranges of keys for each query.

Lengths, sequences, causality and windows leave each query one range of keys, its span. A mask_mod
may leave two ranges of the span, whose ends are numbers of the query (programs/key_ranges.py). So
no pair is computed: time and memory are O(B · T), also at a million tokens. All other masks are
bits (mask_bits.py).

Rows of intervals are int32 [1|B, T, 4], (start, length, start, length), in a normal form: the first
interval is before the second, with at least one key between them. An empty interval is (0, 0), and
only another empty one follows it. A query of padding, or of an invalid row (invalid_values.py),
sees no keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.bounded_numbers import Number
from attn_dispatch.programs.key_ranges import KeySet, key_set
from attn_dispatch.programs.program import axes_of
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.diagonal import Numbers, diagonal_of
from attn_dispatch.semantics.given_ids import iota, pick, row_lengths
from attn_dispatch.semantics.packing import SequenceRanges
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.semantics.segment_runs import SegmentRuns

MOST_INTERVALS = 2
"""The number of intervals in a row."""

Range = tuple[jax.Array, jax.Array]
"""The keys begin <= s < end of each query, int32 [1|B, 1|T]; none if begin >= end."""


def has_intervals(spec: AttentionSpec) -> bool:
    """Whether the mask of a call is intervals whatever its arrays hold.

    The call has lengths that are not symbols, and no pages.
    """
    if spec.has("mask") or (spec.is_packed and spec.most_sequences is None):
        return False
    return spec.meaning.mask_mod is None or _terms(spec) is not None


def _terms(spec: AttentionSpec) -> KeySet | None:
    """The ranges of the call's mask_mod, if they are few and all heads have the same."""
    program = spec.meaning.mask_mod
    assert program is not None
    if spec.num_heads > 1 and "n" in axes_of(program):
        return None
    terms = key_set(program)
    if terms is None or len(terms) > MOST_INTERVALS:
        return None
    return terms


def rows(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """The rows of a call that `has_intervals`."""
    return rows_of(ranges(spec, operands), spec.seq_len_q)


def ranges(spec: AttentionSpec, operands: Operands) -> list[Range]:
    """At most two ranges, which may overlap, of a call that `has_intervals`."""
    spans = KeySpans.of(spec, operands)
    if spec.meaning.mask_mod is None:
        return [spans.within(None, None)]
    terms = _terms(spec)
    assert terms is not None
    if not terms:
        return []
    mod = _Mod.of(spec, operands, spans)
    return [spans.within(mod.number(x.first), mod.number(x.end)) for x in terms]


def rows_of(ranges: Sequence[Range], queries: int) -> jax.Array:
    """The rows of the union of at most two ranges."""
    if not ranges:
        return jnp.zeros((1, queries, 4), jnp.int32)
    flat = jnp.broadcast_arrays(*(x.astype(jnp.int32) for one in ranges for x in one))
    given = list(zip(flat[::2], flat[1::2], strict=True))
    rows = _rows(*given) if len(given) == 1 else _rows(*_union(*given))
    return jnp.broadcast_to(rows, (rows.shape[0], queries, rows.shape[2]))


def _rows(*ranges: Range) -> jax.Array:
    parts: list[jax.Array] = []
    for begin, end in ranges:
        is_empty, nothing = begin >= end, jnp.zeros_like(begin)
        parts += [lax.select(is_empty, nothing, x) for x in (begin, end - begin)]
    parts += [jnp.zeros_like(parts[0])] * (2 * MOST_INTERVALS - len(parts))
    return jnp.stack(parts, axis=-1)


def _union(x: Range, y: Range) -> tuple[Range, Range]:
    """Ranges in order, the second one empty if both are one."""
    is_swapped = (y[0] < x[0]) & (y[0] < y[1]) | (x[0] >= x[1])
    (a, a_end), (b, b_end) = (
        (lax.select(is_swapped, p, q), lax.select(is_swapped, r, s))
        for (q, s), (p, r) in ((x, y), (y, x))
    )
    is_one = (b <= a_end) & (b < b_end)
    return (
        (a, lax.select(is_one, lax.max(a_end, b_end), a_end)),
        (b, lax.select(is_one, b, b_end)),
    )


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
    query_ids: jax.Array | None
    """[B, T], the sequence of each query, counted from 1, if there are several."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Operands) -> KeySpans:
        """The spans of a call that `has_intervals`."""
        queries = _Queries.of(spec, operands)
        first, end = _band(spec, operands, queries)
        first, end = _larger(first, 0), _smaller(end, queries.keys)
        if queries.is_real is not None:
            end = jnp.where(queries.is_real, end, 0)
        return KeySpans(queries.position, queries.start, first, end, queries.ids)

    def within(self, first: Numbers | None, end: Numbers | None) -> Range:
        """The keys of the span from `first` to before `end`, both counted inside the sequence.

        None leaves a side as it is. The range counts from the first key of the batch row.
        """
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

    @staticmethod
    def of(spec: AttentionSpec, operands: Operands) -> _Queries:
        if spec.is_packed:
            return _packed(spec, operands)
        position = iota(spec.seq_len_q)
        if not (spec.has_lengths or spec.has("window")):
            return _Queries(position, 0, spec.seq_len_kv, spec.seq_len_kv - spec.seq_len_q)
        # A negative side of a window makes its batch row invalid, and its lengths 0.
        queries, keys = (row_lengths(spec, operands, x)[:, None] for x in ("query", "key"))
        return _Queries(position, 0, keys, keys - queries, position < queries)


def _packed(spec: AttentionSpec, operands: Operands) -> _Queries:
    if spec.has("query_segment_ids"):
        runs = SegmentRuns.of(spec, operands)
        ids = index = runs.ids.query
        (starts, key_starts), (lengths, key_lengths) = runs.starts, runs.lengths
    else:
        packed = SequenceRanges.of(spec, operands)
        ids, index = packed.sequence_of_query, jnp.maximum(packed.sequence_of_query - 1, 0)
        starts, key_starts = packed.starts_q, packed.starts_kv
        lengths, key_lengths = packed.lengths_q, packed.lengths_kv
    keys = pick(key_lengths, index)
    position = iota(spec.seq_len_q) - pick(starts, index)
    offset = pick(key_starts, index)
    return _Queries(position, offset, keys, keys - pick(lengths, index), ids > 0, ids)


def _band(spec: AttentionSpec, operands: Operands, queries: _Queries) -> tuple[Numbers, Numbers]:
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


def _larger(x: Numbers, y: Numbers) -> Numbers:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def _smaller(x: Numbers, y: Numbers) -> Numbers:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


@dataclass(frozen=True)
class _Mod:
    """The arrays and the indices that a mask_mod is called with."""

    arrays: tuple[jax.Array, ...]
    indices: PairIndices

    @staticmethod
    def of(spec: AttentionSpec, operands: Operands, spans: KeySpans) -> _Mod:
        program = spec.meaning.mask_mod
        assert program is not None
        keys = iota(spec.seq_len_kv)
        indices = PairIndices.of(spec, operands, spans.position, keys, spans.query_ids)
        assert indices is not None
        return _Mod(mods.arrays_of("mask_mod", program, operands), indices)

    def number(self, number: Number | None) -> Numbers | None:
        """The end of a range, of each query; None where it is open."""
        if number is None:
            return None
        at, none = self.indices, [None for _ in self.arrays]
        if number.rest is not None:
            return number.near(at.b, at.n, at.t) if number.of_t else number.rest
        zero = jnp.zeros((1, 1), jnp.int32)
        read = (("b", at.b), ("n", at.n), ("t", at.t))
        indices = [x if name in number.depends else zero for name, x in read]
        by_query = [x.shape[1] > 1 for x in indices]

        def near(b: jax.Array, n: jax.Array, t: jax.Array, *arrays: jax.Array) -> jax.Array:
            return number.near(b, n, t, jnp.int32(0), *arrays)

        function = near
        if any(by_query):
            function = jax.vmap(near, (*(0 if x else None for x in by_query), *none))
        inputs = [x if y else lax.squeeze(x, (1,)) for x, y in zip(indices, by_query, strict=True)]
        inputs += [x if x.shape[0] == 1 else jnp.take(x, at.copies, axis=0) for x in self.arrays]
        result = _for_each(function, inputs)
        return result if any(by_query) else lax.expand_dims(result, (1,))


def _for_each(function: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
    """`jax.vmap` along the first axis, where arrays of length 1 stand for all."""
    are_shared = [x.shape[0] == 1 for x in arrays]
    inputs = [lax.squeeze(x, (0,)) if y else x for x, y in zip(arrays, are_shared, strict=True)]
    if all(are_shared):
        return lax.expand_dims(function(*inputs), (0,))
    return jax.vmap(function, tuple(None if x else 0 for x in are_shared))(*inputs)
