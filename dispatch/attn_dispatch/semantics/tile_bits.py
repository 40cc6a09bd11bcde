"""Sets of tiles as bits: a set of some of K tiles is ceil(K / 32) words, uint32 [..., W].

A GPU makes lists of tiles from such sets in few kernels, without a sort, a scatter or a scan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BITS = 32
"""The bits of a word. Bit i of word w stands for tile w * BITS + i."""

_ALL = np.uint32(2**BITS - 1)


def words_for(tiles: int) -> int:
    """The number of words of sets of so many tiles."""
    return -(-tiles // BITS)


def ranges(begin: jax.Array, end: jax.Array, first: jax.Array) -> jax.Array:
    """The words of the tiles begin <= x < end, where bit 0 of a word stands for tile `first`.

    A range that ends before its begin is empty.
    """
    return _below(end - first) & ~_below(begin - first)


def any_and_all(some: jax.Array, every: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Along the last axis, the union of the sets in `some` and the intersection of those in
    `every`."""

    def both(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return x[0] | y[0], x[1] & y[1]

    union, intersection = lax.reduce(
        (some, every), (np.uint32(0), _ALL), both, (some.ndim - 1,)
    )  # one kernel for both
    return union, intersection


def has(words: jax.Array, row: jax.Array, tile: jax.Array) -> jax.Array:
    """bool [B, *N]: tile[*N] is in the set row[*N] of words [B, M, W]. Both must exist."""
    batch, _, count = words.shape
    index = row * count + lax.div(tile, jnp.int32(BITS))
    word = words.reshape(batch, -1).at[:, index].get(mode="promise_in_bounds")
    return (word >> lax.rem(tile, jnp.int32(BITS)).astype(jnp.uint32)[None]) & 1 > 0


def packed(are_members: jax.Array) -> jax.Array:
    """The words of sets of which each tile, bool [..., W * BITS], is a member or not."""
    bits = are_members.reshape(*are_members.shape[:-1], -1, BITS).astype(jnp.uint32)
    place = lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
    return lax.reduce(bits << place, np.uint32(0), lax.bitwise_or, (bits.ndim - 1,))


def members(words: jax.Array, first: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """How many tiles are in the sets [B, M, W], int32 [B, M], and which, ascending: int32
    [B, M, most], 0 past their number. Bit 0 of a set's first word stands for tile first[M]."""
    batch, sets, count = words.shape
    sizes = lax.population_count(words).astype(jnp.int32)
    upto = np.tri(count, dtype=np.int32)[None, None]
    end = (sizes[:, :, None] * upto).sum(axis=3, dtype=jnp.int32)
    # The member at a place of the list is in the word with begin <= place < end. Few words are
    # compared here, and to search them would take more kernels.
    shape = (batch, count, sets, most)
    place = lax.broadcasted_iota(jnp.int32, shape, 3)
    bits = lax.bitcast_convert_type(words, jnp.int32)  # so that XLA makes one kernel of all sums
    begin, end, bits = (x.swapaxes(1, 2)[..., None] for x in (end - sizes, end, bits))
    is_in_word = (begin <= place) & (place < end)
    before = BITS * lax.broadcasted_iota(jnp.int32, shape, 1)
    nothing = jnp.zeros_like(before)
    zero = np.int32(0)
    bits, before, begin = (
        lax.reduce(lax.select(is_in_word, jnp.broadcast_to(x, shape), nothing), zero, lax.add, (1,))
        for x in (bits, before, begin)
    )
    word = lax.bitcast_convert_type(bits, jnp.uint32)
    found = first[None, :, None] + before + _nth_member(word, place[:, 0] - begin)
    return sizes.sum(axis=2, dtype=jnp.int32), lax.select(word != 0, found, jnp.zeros_like(found))


def _below(tile: jax.Array) -> jax.Array:
    """The word of the tiles below a tile, which may be any number."""
    tile = lax.clamp(np.int32(0), tile, np.int32(BITS)).astype(jnp.uint32)
    # Shifts by 32 are not defined everywhere. For 32 it is 1 - 2, all bits.
    return (jnp.uint32(1) << (tile & (BITS - 1))) - (1 + (tile >> 5))


def _nth_member(word: jax.Array, number: jax.Array) -> jax.Array:
    """The place of a word's member of this number, counted from 0."""
    place = jnp.zeros_like(number)
    for step in (16, 8, 4, 2, 1):
        low = (word >> place.astype(jnp.uint32)) & ((1 << step) - 1)
        skipped = lax.population_count(low).astype(jnp.int32)
        is_past = number >= skipped
        place = lax.select(is_past, place + step, place)
        number = lax.select(is_past, number - skipped, number)
    return place
