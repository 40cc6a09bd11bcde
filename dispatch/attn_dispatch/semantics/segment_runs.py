"""The runs of segment ids of calls with max_segments, found where ids change.

The few places at which runs begin or end are scattered to their ids, in one kernel. Scans over all
places, and searches among them, took a GPU some thirty kernels, and 40 µs at 8,192 places.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.given_ids import (
    ID_OPERANDS,
    SIDES,
    Ids,
    full_length,
    ids_in_range,
    ids_spec,
    longest_run,
    pick,
)


@dataclass(frozen=True)
class SegmentRuns:
    """The queries and the keys of every segment id, from 0 (padding, which has none) to M."""

    ids: Ids
    """0 also in invalid rows."""
    starts: tuple[jax.Array, jax.Array]
    """The first place of each id among queries and among keys, int32 [B, M + 1]; unspecified where
    the id has none."""
    lengths: tuple[jax.Array, jax.Array]
    """0 for ids without places, and for invalid ones."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Operands) -> SegmentRuns:
        """The runs of a call with segment ids and max_segments."""
        arrays = {name: operands[name] for name in ID_OPERANDS if spec.has(name)}
        query, key, invalid, starts, lengths = cast("_Fields", _found(ids_spec(spec), arrays))
        return SegmentRuns(Ids(query, key, invalid), starts, lengths)

    def ranges(self, side: str, length: int) -> tuple[jax.Array, jax.Array]:
        """Starts and lengths [B, M] of ids 1 to M among the `length` places of one side.

        An id without places starts where the next one does, or at the end of the row.
        """
        i = SIDES.index(side)
        lengths = self.lengths[i][:, 1:]
        starts = jnp.where(lengths > 0, self.starts[i][:, 1:], length)
        return lax.cummin(starts, axis=1, reverse=True), lengths


_Both = tuple[jax.Array, jax.Array]
"""An array of queries, and one of keys."""

_Fields = tuple[jax.Array, jax.Array, jax.Array, _Both, _Both]
"""The fields of `SegmentRuns` and of its ids."""


# Both directions need the runs, several times: under jit they are traced once.
@partial(jax.jit, static_argnums=0)
def _found(spec: AttentionSpec, operands: Operands) -> _Fields:
    """The fields, from a spec of `ids_spec`."""
    given, of_row = ids_in_range(spec, operands)
    queries, keys = _runs(spec, given)
    misplaced = queries.is_misplaced | keys.is_misplaced
    is_out = pick(misplaced, given.query)
    assert given.invalid is not None
    invalid = given.invalid | is_out
    lengths_q, lengths_kv = (jnp.where(misplaced, 0, x.end - x.start) for x in (queries, keys))
    return (
        jnp.where(is_out, 0, given.query),
        jnp.where(pick(misplaced, given.key), 0, given.key),
        invalid if of_row is None else invalid | of_row,
        (queries.start, keys.start),
        (lengths_q, lengths_kv),
    )


def table_size(spec: AttentionSpec) -> int:
    """The numbers that are counted for the ids of a call, of one batch row if their number is a
    symbol; 0 without segment ids or max_segments."""
    largest = spec.meaning.max_segments
    if largest is None or not spec.has("query_segment_ids"):
        return 0
    batch = spec.batch if isinstance(spec.batch, int) else 1
    return batch * _NUMBERS * (largest + 1)


_NUMBERS = 6
"""Three of an id's queries and three of its keys."""


@dataclass(frozen=True)
class _Runs:
    """The places of one side's ids, int32 [B, M + 1]; start = end where an id has none."""

    start: jax.Array
    end: jax.Array
    is_misplaced: jax.Array
    """bool: the places are no single run, follow a larger id, or are too many."""


def _runs(spec: AttentionSpec, ids: Ids) -> tuple[_Runs, _Runs]:
    """The runs of both sides."""
    largest = spec.meaning.max_segments
    assert largest is not None
    count, numbers = largest + 1, list[jax.Array]()
    for x in (ids.query, ids.key):
        before, after = (jnp.pad(x, ((0, 0), side)) for side in ((1, 0), (0, 1)))
        is_first, is_last = x != before[:, :-1], x != after[:, 1:]
        place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        length = x.shape[1]
        # The largest of each: of the first beginning, the last beginning and the last end.
        numbers += [
            jnp.where(is_first, length - place, 0),
            jnp.where(is_first, place + 1, 0),
            jnp.where(is_last, place + 1, 0),
        ]
    found = _largest_by_id(numbers, ids, count)
    return _of_side(spec, "query", found[:, :3]), _of_side(spec, "key", found[:, 3:])


def _largest_by_id(numbers: list[jax.Array], ids: Ids, count: int) -> jax.Array:
    """int32 [B, 6, M + 1]: the largest of the six numbers of each id's places, at least 0; the
    first three belong to queries."""
    size = _NUMBERS * count
    indices: list[jax.Array] = []
    for i, x in enumerate(numbers):
        of_place = ids.query if i < _NUMBERS // 2 else ids.key
        # Few places count. mode="drop" ignores the others.
        indices.append(jnp.where((x > 0) & (of_place > 0), i * count + of_place, size))

    def of_row(index: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.zeros(size, jnp.int32).at[index].max(number, mode="drop")

    # Mapped, rows of a sharded batch stay on their devices.
    found = jax.vmap(of_row)(*(jnp.concatenate(x, axis=1) for x in (indices, numbers)))
    return found.reshape(-1, _NUMBERS, count)


def _of_side(spec: AttentionSpec, side: str, found: jax.Array) -> _Runs:
    """The runs of one side, from its part [B, 3, M + 1] of `_largest_by_id`."""
    length = full_length(spec, side)
    end = found[:, 2]
    start = length - found[:, 0]  # the length of the row for ids without places
    is_there = end > 0
    is_several = found[:, 1] - 1 != start
    later = lax.cummin(start, axis=1, reverse=True)  # the first place of this or a larger id
    later = jnp.pad(later, ((0, 0), (0, 1)), constant_values=length)[:, 1:]
    is_long = end - start > longest_run(spec, side)
    is_misplaced = is_there & (is_several | (later < end) | is_long)
    return _Runs(start, jnp.where(is_there, end, start), is_misplaced)
