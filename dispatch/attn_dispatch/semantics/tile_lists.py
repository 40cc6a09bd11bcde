"""Lists of the tiles of pairs that kernels have to compute, from rows of intervals.

A kernel computes tiles of queries and keys. For each tile of one side, a list names the tiles of
the other side that are seen in part, whose pairs need the mask, and another one those seen in full.
Nobody sees the rest, and kernels skip it.

Time and memory are those of the rows and of the lists. Where a static band (key_bands.py) holds the
mask, lists are as long as the band is wide. Else they have an entry for every tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.semantics.interval_union import normal
from attn_dispatch.semantics.key_bands import KeyBand

_NONE, _PARTIAL, _FULL = 0, 1, 2


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
    """[1|B, 1, M]: how many tiles have pairs of both kinds, seen and unseen."""
    partial_indices: jax.Array
    """[1|B, 1, M, K]."""
    full_counts: jax.Array
    """[1|B, 1, M]: how many tiles have seen pairs alone, of real queries and real keys."""
    full_indices: jax.Array
    """[1|B, 1, M, K]."""

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """All four, in the order in which kernels take them."""
        return self.partial_counts, self.partial_indices, self.full_counts, self.full_indices


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a mask, and which of them its band may hold."""

    queries: int
    """T."""
    keys: int
    """S."""
    tile: TileSizes
    band: KeyBand

    @property
    def query_tiles(self) -> int:
        return -(-self.queries // self.tile.queries)

    @property
    def key_tiles(self) -> int:
        return -(-self.keys // self.tile.keys)

    @property
    def forward_width(self) -> int:
        """The length of the list of a tile of queries."""
        return _width(self.band, self.tile.queries, self.tile.keys, self.key_tiles)

    @property
    def backward_width(self) -> int:
        """The length of the list of a tile of keys."""
        return _width(self.band, self.tile.keys, self.tile.queries, self.query_tiles)

    def first_key_tile(self, query_tile: jax.Array) -> jax.Array:
        """The first tile of keys in the list of a tile of queries, if its band is closed."""
        if self.forward_width == self.key_tiles or self.band.low is None:
            return jnp.zeros_like(query_tile)
        first = (query_tile * self.tile.queries + self.band.low) // self.tile.keys
        return jnp.maximum(first, 0)

    def first_query_tile(self, key_tile: jax.Array) -> jax.Array:
        """The first tile of queries in the list of a tile of keys, if its band is closed."""
        if self.backward_width == self.query_tiles or self.band.high is None:
            return jnp.zeros_like(key_tile)
        first = (key_tile * self.tile.keys - self.band.high) // self.tile.queries
        # The list of a tile of keys near the end may not reach past the last tile of queries.
        return jnp.clip(first, 0, self.query_tiles - self.backward_width)

    def forward_bytes(self, batch: int) -> int:
        """Bytes of `forward_lists`."""
        return _lists_bytes(batch, self.query_tiles, self.forward_width)

    def backward_bytes(self, batch: int) -> int:
        """Bytes of `backward_lists`."""
        return _lists_bytes(batch, self.key_tiles, self.backward_width)


def forward_lists(rows: jax.Array, grid: TileGrid) -> TileLists:
    """For each tile of queries its tiles of keys, from rows [1|B, T, 4] of intervals."""
    kinds = _kinds(rows, grid)
    first = grid.first_key_tile(jnp.arange(grid.query_tiles, dtype=jnp.int32))
    return _lists(kinds, first)


def backward_lists(rows: jax.Array, grid: TileGrid) -> TileLists:
    """For each tile of keys its tiles of queries, from rows [1|B, T, 4] of intervals."""
    kinds = _kinds(rows, grid)
    first = grid.first_query_tile(jnp.arange(grid.key_tiles, dtype=jnp.int32))
    if grid.forward_width == grid.key_tiles and grid.backward_width == grid.query_tiles:
        return _lists(kinds.swapaxes(1, 2), first)
    key_tile = jnp.arange(grid.key_tiles, dtype=jnp.int32)[:, None]
    query_tile = first[:, None] + jnp.arange(grid.backward_width, dtype=jnp.int32)[None]
    # Where the entry of a pair of tiles is among those of its tile of queries.
    place = key_tile - grid.first_key_tile(query_tile)
    is_there = (place >= 0) & (place < grid.forward_width)
    found = kinds[:, query_tile, jnp.clip(place, 0, grid.forward_width - 1)]
    return _lists(jnp.where(is_there[None], found, _NONE), first)


def _width(band: KeyBand, tile: int, other_tile: int, other_tiles: int) -> int:
    """The most tiles of the other side that a tile meets inside the band."""
    if band.width is None:
        return other_tiles
    places = tile + band.width - 1
    return min(max((places - 2) // other_tile + 2, 1), other_tiles)


def _lists_bytes(batch: int, tiles: int, width: int) -> int:
    return 4 * batch * tiles * 2 * (1 + width)


def _kinds(rows: jax.Array, grid: TileGrid) -> jax.Array:
    """int32 [1|B, query tiles, forward width]: how a tile is seen, of _NONE, _PARTIAL and _FULL.

    XLA would merge the searches that rows and kinds come from with each of their uses, and repeat
    them there. Barriers keep it from that: lists of images and text took 190 ms on a CPU and take
    5 ms, with 8,192 tokens.
    """
    batch, tiles, height = rows.shape[0], grid.query_tiles, grid.tile.queries
    padding = tiles * height - grid.queries
    rows = lax.optimization_barrier(rows)
    ends = jnp.pad(normal(rows), ((0, 0), (0, padding), (0, 0))).reshape(batch, tiles, -1, 2)
    begin, end = ends[..., 0], ends[..., 0] + ends[..., 1]
    # The tiles of keys first <= j < last that an interval touches, and those that it covers; of one
    # inside a tile last < first. The last tile of keys may be smaller.
    first_touched, last_touched = begin // grid.tile.keys, -(-end // grid.tile.keys)
    first_covered = -(-begin // grid.tile.keys)
    last_covered = jnp.where(end == grid.keys, grid.key_tiles, end // grid.tile.keys)
    ends = jnp.stack([first_touched, last_touched, first_covered, last_covered])
    counts = _counts_up_to(ends, _key_tiles(grid))
    # Intervals do not overlap, so each row has at most one that covers a tile.
    seeing, covering = counts[0] - counts[1], counts[2] - counts[3]
    real = jnp.minimum(grid.queries - jnp.arange(tiles, dtype=jnp.int32) * height, height)
    is_full = covering == real[None, :, None]
    kinds = jnp.where(seeing == 0, _NONE, jnp.where(is_full, _FULL, _PARTIAL))
    return lax.optimization_barrier(kinds.astype(jnp.int32))


def _key_tiles(grid: TileGrid) -> jax.Array:
    """int32 [query tiles, forward width]: the tiles of keys that a list may name."""
    first = grid.first_key_tile(jnp.arange(grid.query_tiles, dtype=jnp.int32))
    return first[:, None] + jnp.arange(grid.forward_width, dtype=jnp.int32)[None]


def _counts_up_to(numbers: jax.Array, limits: jax.Array) -> jax.Array:
    """How many of numbers [parts, 1|B, M, L] are at most each of limits [M, K].

    They are sorted, and limits are searched. To compare all numbers with all limits in a sum would
    be a kernel that XLA takes minutes to compile for GPUs, with 131,072 tokens (JAX 0.10.2).

    Returns:
      int32 [parts, 1|B, M, K].
    """

    def count(row: jax.Array, wanted: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, wanted, side="right", method="scan_unrolled")

    of_tiles = jax.vmap(jax.vmap(jax.vmap(count), (0, None)), (0, None))
    return of_tiles(jnp.sort(numbers, axis=-1), limits).astype(jnp.int32)


def _lists(kinds: jax.Array, first: jax.Array) -> TileLists:
    """Lists from the kinds [1|B, M, K] of tiles that are numbered from `first` [M] on."""
    batch, tiles, width = kinds.shape
    row, tile, number = (lax.broadcasted_iota(jnp.int32, kinds.shape, axis) for axis in range(3))
    found = first[None, :, None] + number
    made: list[jax.Array] = []
    for kind in (_PARTIAL, _FULL):
        is_kind = kinds == kind
        rank = jnp.cumsum(is_kind, axis=2, dtype=jnp.int32) - 1
        # A tile of another kind has a place of its own past the end, where nothing is written.
        place = jnp.where(is_kind, rank, width + number)
        indices = jnp.zeros((batch, tiles, width), jnp.int32)
        indices = indices.at[row, tile, place].set(found, mode="drop", unique_indices=True)
        made += [is_kind.sum(axis=2, dtype=jnp.int32)[:, None], indices[:, None]]
    return TileLists(*made)
