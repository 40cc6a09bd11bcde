"""Lists of the tiles of pairs that kernels have to compute, from a mask of one bit a pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_dispatch.semantics.tile_bits import BITS
from attn_dispatch.semantics.tile_lists import TileGrid, TileLists, lists_of_tiles

_NONE, _ALL = np.uint32(0), np.uint32(2**BITS - 1)


def bit_lists(bits: jax.Array, grid: TileGrid, *, is_backward: bool) -> TileLists:
    """The lists of a mask, uint32 [1|B, 1|N, T, W], as in `forward_lists` and `backward_lists`.

    The grid has no band.
    """
    batch, heads, _, _ = bits.shape
    some, every = (x.reshape(batch * heads, *x.shape[2:]) for x in _seen(bits, grid))
    if is_backward:
        some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
    made = lists_of_tiles(some, every).arrays
    return TileLists(*(x.reshape(batch, heads, *x.shape[2:]) for x in made))


def _seen(bits: jax.Array, grid: TileGrid) -> tuple[jax.Array, jax.Array]:
    """Whether some, and whether all, pairs of a tile are seen, bool [1|B, 1|N, query tiles, key
    tiles]. Only the first step, over the queries of a tile, reads all bits."""
    batch, heads, queries, count = bits.shape
    # Repeated, the last query alters neither.
    padding = grid.query_tiles * grid.tile.queries - queries
    rows = jnp.pad(bits, ((0, 0), (0, 0), (0, padding), (0, 0)), mode="edge")
    rows = rows.reshape(batch, heads, grid.query_tiles, grid.tile.queries, count)
    union = lax.reduce(rows, _NONE, lax.bitwise_or, (3,))
    intersection = lax.reduce(rows, _ALL, lax.bitwise_and, (3,))
    words, wanted = _words(grid)
    wanted = wanted[None, None, None]
    some = (union[..., words] & wanted) != 0
    every = (intersection[..., words] | ~wanted) == _ALL
    return some.any(axis=-1), every.all(axis=-1)


def _words(grid: TileGrid) -> tuple[np.ndarray, np.ndarray]:
    """The words that have keys of each tile, and which of their bits these are: [key tiles, W]."""
    begin = np.arange(grid.key_tiles)[:, None] * grid.tile.keys
    end = np.minimum(begin + grid.tile.keys, grid.keys)
    most = (grid.tile.keys - 2) // BITS + 2 if grid.tile.keys % BITS else grid.tile.keys // BITS
    word = begin // BITS + np.arange(most)
    key = word[..., None] * BITS + np.arange(BITS)
    is_of_tile = (key >= begin[..., None]) & (key < end[..., None])
    wanted = (is_of_tile << np.arange(BITS, dtype=np.uint64)).sum(axis=-1).astype(np.uint32)
    last = -(-grid.keys // BITS) - 1
    return np.minimum(word, last), wanted
