"""Packed sequences: where in a batch row each of them lies, however the caller has said so.

Segment ids and `cu_seqlens` (int32 [B, M + 1]: sequence m of a batch row takes the places
cu_seqlens[m] … cu_seqlens[m + 1] - 1) are wrong where no one can look at them before the call
runs. What they mean then is decided here, for every implementation:

- An id below 1 or above max_segments is padding, and so is everything at or past a length.
- A segment is one run of places. An id below an earlier one, or one that comes back after
  padding, is padding.
- cu_seqlens are clamped to 0 … length and made to ascend; the places of a sequence beyond its
  max_seqlen are padding.

Nothing here has two axes of length: everything is [B, T], [B, S] or [B, M].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec


@dataclass(frozen=True)
class SequenceRanges:
    """The M sequences of every batch row as ranges of places, all inside of the arrays.

    Sequence m of a batch row has the queries starts_q[m] … starts_q[m] + lengths_q[m] - 1, and keys
    likewise. Starts ascend and ranges do not overlap; one that is empty starts where the next one
    does, or at the end of the row.
    """

    starts_q: jax.Array
    """int32 [B, M]."""
    lengths_q: jax.Array
    """int32 [B, M]; 0 where the sequence has no queries."""
    starts_kv: jax.Array
    lengths_kv: jax.Array
    sequence_of_query: jax.Array
    """int32 [B, T]; counted from 1, 0 where the query is padding."""
    sequence_of_key: jax.Array
    """int32 [B, S]."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> SequenceRanges:
        """The ranges of a call with cu_seqlens, with segment ids and max_segments, or without both.

        Segment id m stands for sequence m - 1. A call without either has one sequence in each
        batch row, cut to its lengths where there are any.
        """
        queries, keys = (_side(spec, operands, side) for side in ("query", "key"))
        return SequenceRanges(*queries[:2], *keys[:2], queries[2], keys[2])

    @property
    def live_queries(self) -> jax.Array:
        """bool [B, T]: the query belongs to a sequence."""
        return self.sequence_of_query > 0

    @property
    def live_keys(self) -> jax.Array:
        """bool [B, S]."""
        return self.sequence_of_key > 0


@dataclass(frozen=True)
class Runs:
    """The runs of equal ids in rows of them, made searchable. For ids that `row_ids` has made."""

    ascending: jax.Array
    """int32 [B, L]; the ids, each padding repeating the id before it."""
    real_before: jax.Array
    """int32 [B, L + 1]; how many of the first l places are not padding."""

    @staticmethod
    def of(ids: jax.Array) -> Runs:
        counted = jnp.cumsum(ids > 0, axis=1, dtype=jnp.int32)
        return Runs(lax.cummax(ids, axis=1), jnp.pad(counted, ((0, 0), (1, 0))))

    def find(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each id [B, M]: where its run starts, and how long it is (0 where there is none)."""

        def index(side: str) -> jax.Array:
            return _search(self.ascending, ids, side)

        def before(index: jax.Array) -> jax.Array:
            return jnp.take_along_axis(self.real_before, index, axis=1)

        first, end = index("left"), index("right")
        return first, before(end) - before(first)


def flat_starts(starts: jax.Array, length: int) -> jax.Array:
    """[B · M + 1]: where sequences start [B, M], once rows of `length` lie one after the other."""
    batch = starts.shape[0]
    first = length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.append((first + starts).reshape(-1), jnp.int32(batch * length))


def is_packed(spec: AttentionSpec) -> bool:
    """Whether a batch row may hold several sequences."""
    return spec.has("query_segment_ids") or spec.has("cu_seqlens_q")


def row_ids(spec: AttentionSpec, operands: Mapping[str, jax.Array], side: str) -> jax.Array:
    """Which segment or sequence each place belongs to, int32 [B, L] of "query" or "key".

    Padding is 0, and the places of every other id are one run, ids ascending along the row. All
    places that lengths alone leave have id 1.
    """
    length, longest = _full_length(spec, side), _longest(spec, side)
    if spec.has("cu_seqlens_q"):
        return _sequence_of(ascending(operands[_CU_SEQLENS[side]], length), length, longest)
    limit = row_lengths(spec, operands, side)[:, None]
    if spec.has("query_segment_ids"):
        largest = spec.options.max_segments
        return _segments(operands[_SEGMENT_IDS[side]], limit, largest)
    inside = (_iota(length) < limit).astype(jnp.int32)
    return jnp.broadcast_to(inside, (spec.batch, length))


def row_lengths(spec: AttentionSpec, operands: Mapping[str, jax.Array], side: str) -> jax.Array:
    """The lengths of batch rows on one side, clamped to the array; int32 [B]."""
    full = _full_length(spec, side)
    if not spec.has(_LENGTHS[side]):
        return jnp.full((spec.batch,), full, jnp.int32)
    return jnp.clip(operands[_LENGTHS[side]], 0, full).astype(jnp.int32)


def ascending(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """The same, made to ascend within 0 … length, so that wrong ones reach no other memory."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, length), axis=1)


_FEW = 256
"""Sequences up to which comparing a place with each of them is cheap."""

_CU_SEQLENS = {"query": "cu_seqlens_q", "key": "cu_seqlens_kv"}
_SEGMENT_IDS = {"query": "query_segment_ids", "key": "key_value_segment_ids"}
_LENGTHS = {"query": "query_seq_lengths", "key": "key_value_seq_lengths"}


def _side(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], side: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Starts and lengths [B, M], and the sequence of every place [B, L]."""
    of_place = row_ids(spec, operands, side)
    if spec.has("cu_seqlens_q"):
        cu = ascending(operands[_CU_SEQLENS[side]], _full_length(spec, side))
        lengths = jnp.minimum(jnp.diff(cu, axis=1), _longest(spec, side))
        return cu[:, :-1], lengths, of_place
    if spec.has("query_segment_ids"):
        sequences = spec.options.max_segments
        if sequences is None:
            raise ValueError("SequenceRanges: expected max_segments with segment ids, got None")
        ids = jnp.arange(1, sequences + 1, dtype=jnp.int32)
        starts, lengths = Runs.of(of_place).find(jnp.broadcast_to(ids, (spec.batch, sequences)))
        return starts, lengths, of_place
    lengths = row_lengths(spec, operands, side)[:, None]
    return jnp.zeros_like(lengths), lengths, of_place


def _segments(ids: jax.Array, lengths: jax.Array, largest: int | None) -> jax.Array:
    """The ids with everything that is padding made 0; `lengths` are [B, 1]."""
    places = _iota(ids.shape[1])
    is_real = (ids > 0) & (places < lengths)
    if largest is not None:
        is_real &= ids <= largest
    ids = jnp.where(is_real, ids, 0)
    highest = lax.cummax(ids, axis=1)
    is_first = highest > jnp.pad(highest, ((0, 0), (1, 0)))[:, :-1]
    run_start = lax.cummax(jnp.where(is_first, places, 0), axis=1)
    last_other = lax.cummax(jnp.where(ids == highest, -1, places), axis=1)
    return jnp.where(last_other < run_start, ids, 0)


def _sequence_of(cu_seqlens: jax.Array, length: int, longest: int) -> jax.Array:
    """Which sequence each place belongs to, counted from 1, and 0 where none: int32 [B, length]."""
    places = _iota(length)
    index = _search(cu_seqlens, jnp.broadcast_to(places, (cu_seqlens.shape[0], length)), "right")
    is_inside = (index > 0) & (index < cu_seqlens.shape[1])
    if longest < length:
        start = jnp.take_along_axis(cu_seqlens, jnp.maximum(index - 1, 0), axis=1)
        is_inside &= places - start < longest
    return jnp.where(is_inside, index, 0).astype(jnp.int32)


def _search(rows: jax.Array, wanted: jax.Array, side: str) -> jax.Array:
    """Where each of `wanted` [B, M] would go into the ascending `rows` [B, L]; int32 [B, M]."""
    # One kernel on a GPU, either way; a loop would be some thirty.
    is_small = min(rows.shape[1], wanted.shape[1]) <= _FEW
    method = "compare_all" if is_small else "scan_unrolled"

    def search(row: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, values, side=side, method=method)

    return jax.vmap(search)(rows, wanted).astype(jnp.int32)


def _longest(spec: AttentionSpec, side: str) -> int:
    """The most places a packed sequence may have."""
    longest, full = spec.options.max_seq_lens, _full_length(spec, side)
    return full if longest is None else min(longest[side == "key"], full)


def _full_length(spec: AttentionSpec, side: str) -> int:
    return spec.seq_len_q if side == "query" else spec.seq_len_kv


def _iota(length: int) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32)[None, :]
