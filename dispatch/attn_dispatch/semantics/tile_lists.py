"""Lists of the tiles of pairs that kernels have to compute, from rows of intervals.

A kernel computes tiles of queries and keys. For each tile of one side, a list names the tiles of
the other side that are seen in part, whose pairs need the mask, and another one those seen in full.
Nobody sees the rest, and kernels skip it.

Time and memory are those of the rows and of the lists. Where a static band (diagonal.py) holds the
mask, lists are as long as the band is wide. Else they have an entry for every tile.

The program that makes lists does not depend on the mask: the ends of its band are operands, and
lengths of lists are multiples of a word's bits. So JAX traces and lowers it for the first mask of
a shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from attn_dispatch.semantics.diagonal import KeyBand
from attn_dispatch.semantics.tile_bits import (
    BITS,
    any_and_all,
    has,
    members,
    packed,
    ranges,
    words_for,
)

Ends = tuple[ArrayLike, ArrayLike]
"""Where a band begins and ends, `KeyBand.ends`; not read where lists name all tiles."""


@dataclass(frozen=True)
class TileSizes:
    """The queries and keys of a tile."""

    queries: int
    keys: int


@dataclass(frozen=True)
class TileLists:
    """For each of M tiles, the tiles of the other side that it has to be computed with; int32.

    Indices ascend. Those past a count are 0.
    """

    partial_counts: jax.Array
    """[1|B, 1|N, M]: how many tiles have pairs of both kinds, seen and unseen."""
    partial_indices: jax.Array
    """[1|B, 1|N, M, K]."""
    full_counts: jax.Array
    """[1|B, 1|N, M]: how many tiles have seen pairs alone, of real queries and real keys."""
    full_indices: jax.Array
    """[1|B, 1|N, M, K]."""

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """All four, in the order in which kernels take them."""
        return self.partial_counts, self.partial_indices, self.full_counts, self.full_indices


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a mask, and the lengths of lists of them."""

    queries: int
    """T."""
    keys: int
    """S."""
    tile: TileSizes
    forward_width: int
    """The length of the list of a tile of queries."""
    backward_width: int
    """The length of the list of a tile of keys."""

    @staticmethod
    def of(queries: int, keys: int, tile: TileSizes, band: KeyBand) -> TileGrid:
        """The grid of masks that the band holds."""
        query_tiles, key_tiles = -(-queries // tile.queries), -(-keys // tile.keys)
        forward = _width(band, tile.queries, tile.keys, key_tiles)
        backward = _width(band, tile.keys, tile.queries, query_tiles)
        return TileGrid(queries, keys, tile, forward, backward)

    @property
    def query_tiles(self) -> int:
        return -(-self.queries // self.tile.queries)

    @property
    def key_tiles(self) -> int:
        return -(-self.keys // self.tile.keys)

    def first_key_tile(self, query_tile: jax.Array, low: ArrayLike) -> jax.Array:
        """The first tile of keys in the list of a tile of queries, from where the band begins."""
        if self.forward_width == self.key_tiles:
            return jnp.zeros_like(query_tile)
        first = jnp.maximum(query_tile * self.tile.queries + low, 0)
        return lax.div(first, jnp.int32(self.tile.keys))

    def first_query_tile(self, key_tile: jax.Array, high: ArrayLike) -> jax.Array:
        """The first tile of queries in the list of a tile of keys, from where the band ends."""
        if self.backward_width == self.query_tiles:
            return jnp.zeros_like(key_tile)
        first = jnp.maximum(key_tile * self.tile.keys - high, 0)
        first = lax.div(first, jnp.int32(self.tile.queries))
        # The list of a tile of keys near the end may not reach past the last tile of queries.
        return jnp.minimum(first, self.query_tiles - self.backward_width)

    def forward_bytes(self, batch: int) -> int:
        """Bytes of `forward_lists`."""
        return _lists_bytes(batch, self.query_tiles, self.forward_width)

    def backward_bytes(self, batch: int) -> int:
        """Bytes of `backward_lists`."""
        return _lists_bytes(batch, self.key_tiles, self.backward_width)


def forward_lists(rows: jax.Array, grid: TileGrid, ends: Ends) -> TileLists:
    """For each tile of queries its tiles of keys.

    Args:
      rows: [1|B, T, 4], intervals in the normal form of intervals.py.
      grid: the tiles, and the lengths of the lists.
      ends: `KeyBand.ends` of a band that holds the mask.
    """
    first = grid.first_key_tile(_numbers(grid.query_tiles), ends[0])
    seen, full = _seen_and_full(rows, grid, first)
    return _lists(seen, full, first, grid.forward_width)


def backward_lists(rows: jax.Array, grid: TileGrid, ends: Ends) -> TileLists:
    """For each tile of keys its tiles of queries, from the same as `forward_lists`."""
    (low, high), width = ends, grid.backward_width
    key_tiles = _numbers(grid.key_tiles)
    first = grid.first_query_tile(key_tiles, high)
    key_tile = key_tiles[:, None]
    number = _numbers(words_for(width) * BITS)[None]
    query_tile = jnp.minimum(first[:, None] + number, grid.query_tiles - 1)
    # Where the tile of keys is among those that the set of a tile of queries may name.
    place = key_tile - grid.first_key_tile(query_tile, low)
    is_there = (number < width) & (place >= 0) & (place < grid.forward_width)
    place = jnp.clip(place, 0, grid.forward_width - 1)
    sets = _seen_and_full(rows, grid, grid.first_key_tile(_numbers(grid.query_tiles), low))
    seen, full = (packed(has(words, query_tile, place) & is_there[None]) for words in sets)
    return _lists(seen, full, first, width)


def lists_of_tiles(some: jax.Array, every: jax.Array) -> TileLists:
    """The lists of M tiles, from bool [B, M, K]: whether pairs of both are seen, and whether all
    are."""
    tiles, width = some.shape[1:]
    padding = ((0, 0), (0, 0), (0, words_for(width) * BITS - width))
    seen, full = (packed(jnp.pad(x, padding)) for x in (some, every))
    return _lists(seen, full, jnp.zeros(tiles, jnp.int32), width)


def _width(band: KeyBand, tile: int, other_tile: int, other_tiles: int) -> int:
    """A length of lists for the most tiles of the other side that a tile meets inside the band."""
    if band.width is None:
        return other_tiles
    places = tile + band.width - 1
    most = max((places - 2) // other_tile + 2, 1)
    return min(words_for(most) * BITS, other_tiles)


def _lists_bytes(batch: int, tiles: int, width: int) -> int:
    return 4 * batch * tiles * 2 * (1 + width)


def _seen_and_full(
    rows: jax.Array, grid: TileGrid, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sets of tiles of keys that are seen, and seen in full, for each tile of queries: words
    [1|B, query tiles, W] from its first tile of keys on.

    XLA for CPUs would merge the searches that some rows come from with each of their uses, and
    repeat them there. A barrier keeps it from that.
    """
    tiles, height, width = grid.query_tiles, grid.tile.queries, jnp.int32(grid.tile.keys)
    rows = lax.optimization_barrier(rows)
    if padding := tiles * height - grid.queries:
        # Repeated, the last query alters neither set.
        rows = jnp.pad(rows, ((0, 0), (0, padding), (0, 0)), mode="edge")
    rows = rows.reshape(rows.shape[0], tiles, 1, height, 4)
    words = words_for(grid.forward_width)
    first = (first[:, None] + BITS * _numbers(words)[None])[None, :, :, None]
    touched: list[jax.Array] = []
    covered: list[jax.Array] = []
    for begin, length in ((rows[..., 0], rows[..., 1]), (rows[..., 2], rows[..., 3])):
        end = begin + length
        last_touched = lax.div(end + (width - 1), width)
        touched.append(ranges(lax.div(begin, width), last_touched, first))
        # The last tile of keys may be smaller.
        last_covered = jnp.where(end == grid.keys, grid.key_tiles, lax.div(end, width))
        covered.append(ranges(lax.div(begin + (width - 1), width), last_covered, first))
    # Keys are between both intervals, so that none but one of them covers a tile.
    return any_and_all(touched[0] | touched[1], covered[0] | covered[1])


def _lists(seen: jax.Array, full: jax.Array, first: jax.Array, width: int) -> TileLists:
    """The lists of sets of tiles that are numbered from `first` [M] on."""
    made: list[jax.Array] = []
    for words in (seen & ~full, full):
        counts, indices = members(words, first, width)
        made += [counts[:, None], indices[:, None]]
    return TileLists(*made)


def _numbers(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)
