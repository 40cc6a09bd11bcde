"""The rows and lists of a mask that is a static band, by NumPy.

Such a mask depends on no array, so that its rows and lists can be constants of the program. No
kernel computes them when it runs, and JAX traces and lowers none of what would.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.diagonal import KeyBand, static_offset
from attn_dispatch.semantics.mask_spec import mask_operands
from attn_dispatch.semantics.tile_lists import TileGrid

MAX_BYTES = 2**18
"""The most bytes of rows, or of the lists of one direction, that are constants: those of 16,384
queries and as many keys."""


def static_band(spec: AttentionSpec) -> KeyBand | None:
    """The band that is the mask of a call that `has_intervals`; None if it is not just a band."""
    if mask_operands(spec) or spec.meaning.mask_mod is not None or spec.is_packed:
        return None
    if spec.band != (None, None) and static_offset(spec) is None:
        return None
    return KeyBand.of(spec)


def rows_bytes(queries: int) -> int:
    """Bytes of `band_rows`."""
    return 16 * queries


@lru_cache(maxsize=64)
def band_rows(queries: int, keys: int, band: KeyBand) -> np.ndarray:
    """int32 [1, T, 4], as `intervals.rows_of` makes them."""
    place = np.arange(queries)
    begin = np.zeros_like(place) if band.low is None else np.maximum(place + band.low, 0)
    end = np.full_like(place, keys)
    if band.high is not None:
        end = np.minimum(end, place + band.high + 1)
    is_empty = begin >= end
    rows = np.zeros((1, queries, 4), np.int32)
    rows[0, :, 0] = np.where(is_empty, 0, begin)
    rows[0, :, 1] = np.where(is_empty, 0, end - begin)
    return rows


@lru_cache(maxsize=64)
def band_lists(grid: TileGrid, band: KeyBand, *, is_backward: bool) -> tuple[np.ndarray, ...]:
    """The arrays of `TileLists`, as `tile_lists.forward_lists` and `backward_lists` make them."""
    seen, full = _seen_and_full(grid, band)
    width = grid.backward_width if is_backward else grid.forward_width
    if is_backward:
        seen, full = seen.T, full.T
    return (*_lists(seen & ~full, width), *_lists(full, width))


def _seen_and_full(grid: TileGrid, band: KeyBand) -> tuple[np.ndarray, np.ndarray]:
    """bool [query tiles, key tiles]: whether some pair of both is seen, and whether all are."""
    begin, length = band_rows(grid.queries, grid.keys, band)[0, :, :2].T
    end, first = begin + length, np.arange(grid.query_tiles) * grid.tile.queries
    low = np.where(length > 0, begin, grid.keys)  # a query that sees nothing covers no tile
    tile_begin = np.arange(grid.key_tiles) * grid.tile.keys
    tile_end = np.minimum(tile_begin + grid.tile.keys, grid.keys)
    # Ranges of neighbours overlap or touch, so that their union is a range as well.
    union = np.minimum.reduceat(low, first)[:, None], np.maximum.reduceat(end, first)[:, None]
    common = np.maximum.reduceat(low, first)[:, None], np.minimum.reduceat(end, first)[:, None]
    seen = (tile_begin < union[1]) & (tile_end > union[0])
    return seen, (tile_begin >= common[0]) & (tile_end <= common[1])


def _lists(are_members: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The counts int32 [1, 1, M] and, ascending, the indices int32 [1, 1, M, K] of members."""
    counts = are_members.sum(axis=1, dtype=np.int32)
    line, member = are_members.nonzero()
    indices = np.zeros((len(counts), width), np.int32)
    indices[line, np.arange(len(line)) - (counts.cumsum() - counts)[line]] = member
    return counts[None, None], indices[None, None]
