"""Unions of ranges of keys, as at most two intervals for each query.

Rows of intervals are int32 [..., 4], (start, length, start, length). In the union's normal form the
first interval is before the second, with at least one key between them, and an empty interval is
(0, 0) and never before another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

MOST_INTERVALS = 2
"""So many intervals has a row."""

Range = tuple[jax.Array, jax.Array]
"""The keys begin <= k < end of each query, int32 of any shapes that broadcast; empty if begin >=
end."""


def union(ranges: Sequence[Range]) -> tuple[jax.Array, jax.Array | None]:
    """The rows of the union of these ranges, [..., 4], and which rows have more intervals, [...].

    The latter is None where no row can have more. Of such a row, the first and the last interval
    are returned.
    """
    if not ranges:
        raise ValueError("union: expected one range or more, got none")
    flat = jnp.broadcast_arrays(*(x.astype(jnp.int32) for one in ranges for x in one))
    ranges = list(zip(flat[::2], flat[1::2], strict=True))
    if len(ranges) == 1:
        return _rows(*ranges), None
    if len(ranges) == MOST_INTERVALS:
        return _of_two(*ranges), None
    return _of_many(ranges)


def _rows(*ranges: Range) -> jax.Array:
    parts: list[jax.Array] = []
    for begin, end in ranges:
        is_empty, nothing = begin >= end, jnp.zeros_like(begin)
        parts += [lax.select(is_empty, nothing, x) for x in (begin, end - begin)]
    parts += [jnp.zeros_like(parts[0])] * (2 * MOST_INTERVALS - len(parts))
    return jnp.stack(parts, axis=-1)


def _of_two(x: Range, y: Range) -> jax.Array:
    is_swapped = (y[0] < x[0]) & (y[0] < y[1]) | (x[0] >= x[1])
    (a, a_end), (b, b_end) = (
        (lax.select(is_swapped, p, q), lax.select(is_swapped, r, s))
        for (q, s), (p, r) in ((x, y), (y, x))
    )
    is_one = (b <= a_end) & (b < b_end)
    # An empty range becomes (0, 0).
    return _rows(
        (a, lax.select(is_one, lax.max(a_end, b_end), a_end)),
        (b, lax.select(is_one, b, b_end)),
    )


def _of_many(ranges: Sequence[Range]) -> tuple[jax.Array, jax.Array]:
    far = jnp.iinfo(jnp.int32).max
    begins = jnp.stack([jnp.where(x < y, x, far) for x, y in ranges])
    ends = jnp.stack([jnp.where(x < y, y, far) for x, y in ranges])
    begins, ends = lax.sort((begins, ends), dimension=0, num_keys=1)
    parts = [(begins[i], ends[i]) for i in range(len(ranges))]
    a, a_end = parts[0]
    b, b_end = jnp.full_like(a, far), jnp.zeros_like(a)
    most = a_end  # the largest end so far
    count = jnp.where(a < far, 1, 0)
    for begin, end in parts[1:]:
        is_range = begin < far
        is_new = is_range & (begin > most)
        count += jnp.where(is_new, 1, 0)
        a_end = jnp.where(is_range & (count == 1), jnp.maximum(a_end, end), a_end)
        b = jnp.where(is_new, begin, b)
        most = jnp.where(is_range, jnp.maximum(most, end), most)
    b_end = jnp.where(count > 1, most, 0)
    a = jnp.where(count > 0, a, 0)
    a_end = jnp.where(count > 0, a_end, 0)
    return _rows((a, a_end), (b, b_end)), count > MOST_INTERVALS


def any_of(*flags: jax.Array | None) -> jax.Array | None:
    """The disjunction of bool scalars that may be absent; None if all are."""
    given = [x for x in flags if x is not None]
    return reduce(jnp.logical_or, given) if given else None
