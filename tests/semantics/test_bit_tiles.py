"""Lists of tiles from bits against tiles of the same masks over all pairs, judged in NumPy."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import jax
import numpy as np
import pytest

from attn_dispatch.semantics import mask_bits
from attn_dispatch.semantics.diagonal import KeyBand
from attn_dispatch.semantics.tile_lists import TileGrid, TileSizes
from tests.support import bits
from tests.support.interval_masks import lists
from tests.support.mutants import fails, mutant

GRIDS = (
    (300, 300, (128, 128)),
    (290, 260, (192, 128)),
    (130, 500, (128, 112)),
    (256, 333, (128, 80)),
    (129, 193, (128, 96)),
    (128, 64, (128, 64)),
    (40, 50, (8, 8)),
    (37, 70, (4, 3)),
    (20, 31, (8, 33)),
    (9, 100, (4, 34)),
)
"""Queries, keys, and the queries and keys of a tile."""


def check(module: ModuleType, number: int) -> None:
    """Judge a module's lists of a drawn mask."""
    queries, keys, tile = GRIDS[number]
    rng = np.random.default_rng(number)
    masks = ((2, 2), (1, 1), (1, 3))
    for batch, heads in masks:
        seen = bits.drawn(rng, (batch, heads, queries, keys))
        if (batch, heads) == (1, 1):
            seen[:] = True
        grid = TileGrid.of(queries, keys, TileSizes(*tile), KeyBand())
        for is_backward in (False, True):

            @jax.jit
            def made(mask, is_backward=is_backward, grid=grid):
                return module.bit_lists(mask, grid, is_backward=is_backward).arrays

            with jax.numpy_rank_promotion("raise"):
                found = made(bits.packed(seen))
            flat = seen.reshape(batch * heads, queries, keys)
            expected = lists(flat, *tile, by_keys=is_backward)
            for x, y in zip(found, expected, strict=True):
                assert x.dtype == np.int32
                np.testing.assert_array_equal(x, y.reshape(batch, heads, *y.shape[2:]))


@pytest.mark.parametrize("number", range(len(GRIDS)), ids=lambda x: str(GRIDS[x]))
def test_lists_name_the_tiles_of_the_mask(number: int):
    check(mask_bits, number)


MUTANTS = {
    "padding rows that hide": (', mode="edge"', ""),
    "some by all rows": ("_NONE, lax.bitwise_or", "_ALL, lax.bitwise_and"),
    "all by some row": ("_ALL, lax.bitwise_and", "_NONE, lax.bitwise_or"),
    "all by one word": ("every.all(axis=-1)", "every.any(axis=-1)"),
    "some by every word": ("some.any(axis=-1)", "some.all(axis=-1)"),
    "padding keys must be seen": (" | ~wanted)", ")"),
    "bits of other tiles": (" & wanted)", ")"),
    "a tile too narrow": ("keys - 2) // BITS + 2", "keys - 2) // BITS + 1"),
    "a tile of whole words too narrow": ("else grid.tile.keys // BITS", "else 1"),
    "the last tile past the last key": ("np.minimum(begin + grid.tile.keys, grid.keys)",
                                        "begin + grid.tile.keys"),
    "tiles one key later": ("key >= begin", "key > begin"),
    "words from the first one on": ("begin // BITS +", "0 * begin +"),
    "heads exchanged with rows": ("reshape(batch, heads,", "reshape(heads, batch,"),
    "backward lists not transposed": ("if is_backward:", "if False:"),
}  # fmt: skip
"""Wrong list builders: what is wrong, and the text that makes it so."""


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_lists_are_noticed(name: str):
    wrong = mutant(mask_bits, *MUTANTS[name])
    assert any(fails(partial(check, wrong, number)) for number in range(len(GRIDS)))
