"""Grids of tiles, and the judge of lists of them: it finds each tile's kind in the dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from attn_dispatch.semantics import tile_lists
from attn_dispatch.semantics.diagonal import KeyBand


@dataclass(frozen=True)
class Lengths:
    queries: int
    keys: int
    tile: tuple[int, int]
    band: tuple[int | None, int | None] = (None, None)

    def grid(self, module: ModuleType = tile_lists) -> Any:
        tile = module.TileSizes(*self.tile)
        return module.TileGrid.of(self.queries, self.keys, tile, KeyBand(*self.band))

    @property
    def ends(self) -> Any:
        return KeyBand(*self.band).ends


GRIDS = (
    Lengths(40, 50, (8, 8)),
    Lengths(37, 20, (8, 4)),
    Lengths(64, 64, (16, 8)),
    Lengths(5, 90, (8, 16)),
    Lengths(30, 60, (8, 16), (None, 3)),
    Lengths(64, 64, (8, 8), (-9, 0)),
    Lengths(61, 70, (16, 4), (-3, 12)),
    Lengths(50, 61, (4, 16), (20, 33)),
    Lengths(90, 40, (8, 8), (-70, -50)),
    Lengths(40, 40, (8, 8), (5, 5)),
    Lengths(40, 40, (8, 8), (45, 60)),
    Lengths(100, 201, (2, 3)),  # sets of tiles of several words
    Lengths(129, 131, (4, 1), (-70, 9)),
    Lengths(139, 260, (1, 4), (11, 90)),
    Lengths(139, 270, (1, 4), (-80, 45)),  # lists of 33 tiles
)


def kinds_of(mask: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """0, 1 or 2 for tiles of a mask [B, T, S] that are seen not at all, in part or in full."""
    height, width = tile
    found = np.zeros((len(mask), -(-mask.shape[1] // height), -(-mask.shape[2] // width)), int)
    for at in np.ndindex(*found.shape):
        b, i, j = at
        pairs = mask[b, i * height : (i + 1) * height, j * width : (j + 1) * width]
        found[at] = 2 if pairs.all() else int(pairs.any())
    return found


def judge(lists: Any, kinds: np.ndarray) -> None:
    """Assert that lists name the tiles of these kinds [B, M, N], for each of the M tiles."""
    both = (
        (1, lists.partial_counts, lists.partial_indices),
        (2, lists.full_counts, lists.full_indices),
    )
    for kind, counts, indices in both:
        counts, indices = np.asarray(counts), np.asarray(indices)
        assert counts.dtype == indices.dtype == np.int32
        assert counts.shape == (len(kinds), 1, kinds.shape[1])
        assert indices.shape[:3] == counts.shape and indices.shape[3] <= kinds.shape[2]
        np.testing.assert_array_equal(counts[:, 0], (kinds == kind).sum(axis=2))
        for b, i in np.ndindex(*kinds.shape[:2]):
            expected = np.flatnonzero(kinds[b, i] == kind)
            np.testing.assert_array_equal(indices[b, 0, i, : len(expected)], expected)
            assert (indices[b, 0, i, len(expected) :] == 0).all()
