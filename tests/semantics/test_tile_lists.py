"""Lists of tiles against tiles of the same masks over all pairs, judged in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from attn_dispatch.semantics import tile_lists
from attn_dispatch.semantics.diagonal import KeyBand
from attn_dispatch.semantics.intervals import rows_of
from attn_dispatch.semantics.tile_lists import TileGrid, TileSizes
from tests.support.interval_calls import Draw, dense
from tests.support.mutants import fails, mutant
from tests.support.tile_grids import GRIDS, Lengths, judge, kinds_of

DRAWS = 30


def drawn_rows(grid: Lengths, rng: Draw) -> np.ndarray:
    """Rows of intervals inside the band, with dead rows and equal rows."""
    batch, t, s = 2, grid.queries, grid.keys
    ends = np.sort(rng.randint(0, s + 1, (batch, t, 2, 2)), axis=3)
    if rng.rand() < 0.6:
        ends = np.repeat(ends[:, ::8], 8, axis=1)[:, :t]
    if rng.rand() < 0.5:
        ends[:, :, 0] = 0, s
    low, high = grid.band
    query = np.arange(t)[None, :, None, None]
    ends = np.clip(ends, 0 if low is None else np.clip(query + low, 0, s), s)
    ends = np.clip(ends, 0, s if high is None else np.clip(query + high + 1, 0, s))
    rows = np.stack([ends[..., 0], ends[..., 1] - ends[..., 0]], axis=-1)
    if rng.rand() < 0.5:
        rows[:, rng.randint(0, t, 3)] = 0
    if rng.rand() < 0.3:
        rows[:, :, 1] = 0
    a, length_a, b, length_b = np.moveaxis(rows.reshape(batch, t, 4), 2, 0).astype(np.int32)
    return np.asarray(rows_of([(a, a + length_a), (b, b + length_b)], t))


def check(grid: Lengths, module: ModuleType, draws: int) -> None:
    """Judge a module's lists of drawn rows."""
    made = grid.grid(module)

    @jax.jit
    def both(rows: jax.Array) -> Any:
        made_of = rows, made, grid.ends
        lists = module.forward_lists(*made_of), module.backward_lists(*made_of)
        return [vars(x) for x in lists]

    rng = Draw(grid.queries)
    for _ in range(draws):
        rows = drawn_rows(grid, rng)
        with jax.numpy_rank_promotion("raise"):
            forward, backward = (module.TileLists(**x) for x in both(rows))
        kinds = kinds_of(dense(rows, grid.keys), grid.tile)
        judge(forward, kinds)
        judge(backward, kinds.swapaxes(1, 2))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_lists_name_the_tiles_of_the_mask(grid):
    check(grid, tile_lists, DRAWS)


MUTANTS = {
    "a tile beyond an interval": ("end + (width - 1), width", "end + width, width"),
    "a tile before an interval": ("lax.div(begin, width)", "lax.div(begin - 1, width)"),
    "the second interval ignored": ("(rows[..., 2], rows[..., 3])", "(rows[..., 0], rows[..., 1])"),
    "tiles covered by two rows": ("any_and_all(touched[0] | touched[1], covered[0] | covered[1])",
                                  "[any_and_all(x, x)[0] for x in (touched[0] | touched[1], "
                                  "covered[0] | covered[1])]"),
    "padding rows must see": ('(0, 0)), mode="edge"', "(0, 0))"),
    "padding keys must be seen": ("jnp.where(end == grid.keys, grid.key_tiles,",
                                  "jnp.where(end < 0, grid.key_tiles,"),
    "tiles covered from their middle on": ("lax.div(begin + (width - 1),", "lax.div(begin,"),
    "full tiles in both lists": ("seen & ~full", "seen"),
    "a list too short": ("(places - 2) // other_tile + 2", "(places - 1) // other_tile + 1"),
    "backward lists not transposed": ("has(words, query_tile, place)",
                                      "has(words, key_tile + 0 * place, query_tile)"),
    "the band of keys one tile off": ("+ low, 0)", "+ low + self.tile.keys, 0)"),
    "the band of queries one tile off": ("- high, 0)", "- high + self.tile.queries, 0)"),
    "a list that ends past the last tile": ("self.query_tiles - self.backward_width)",
                                            "self.query_tiles)"),
    "pairs of tiles outside the band": ("& is_there[None]", "& True"),
    "tiles past the list": ("(number < width) & ", ""),
    "kinds exchanged": ("for words in (seen & ~full, full)", "for words in (full, seen & ~full)"),
}  # fmt: skip
"""Wrong list builders: what is wrong, and the text that makes it so."""


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_lists_are_noticed(name):
    wrong = mutant(tile_lists, *MUTANTS[name])
    assert any(fails(partial(check, grid, wrong, 3)) for grid in GRIDS)


def test_bytes_are_those_of_the_lists():
    for grid in GRIDS:
        made = grid.grid()
        rows = np.zeros((2, grid.queries, 4), np.int32)
        assert bytes_of(tile_lists.forward_lists, rows, made) == made.forward_bytes(2)
        assert bytes_of(tile_lists.backward_lists, rows, made) == made.backward_bytes(2)


def bytes_of(function: Callable[..., Any], rows: np.ndarray, grid: TileGrid) -> int:
    shapes = jax.eval_shape(lambda x: list(vars(function(x, grid, (0, 0))).values()), rows)
    return sum(4 * x.size for x in shapes)


def test_lists_of_a_million_tokens_in_documents_are_small():
    tokens, longest = 2**20, 8192
    grid = TileGrid.of(tokens, tokens, TileSizes(128, 128), KeyBand(1 - longest, 0))
    assert grid.forward_width == 96 and grid.backward_width == 96
    assert grid.forward_bytes(1) + grid.backward_bytes(1) <= 2**24
    without = TileGrid.of(tokens, tokens, TileSizes(128, 128), KeyBand())
    assert without.forward_bytes(1) > 2**28
