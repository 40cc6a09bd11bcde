"""Sets of tiles as bits, against sets of Python's."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics import tile_bits
from tests.support.interval_calls import Draw
from tests.support.mutants import fails, mutant

WIDTHS = (1, 7, 31, 32, 33, 64, 100)
BATCH, SETS = 2, 5


def drawn(width: int, seed: int) -> np.ndarray:
    """Which tiles are in each set, bool [BATCH, SETS, width]; among them are an empty set and a
    full one."""
    rng = Draw(seed)
    found = rng.rand(BATCH, SETS, width) < rng.rand(BATCH, SETS, 1)
    found[0, 0], found[1, 1] = False, True
    return found


def words_of(are_members: np.ndarray) -> np.ndarray:
    """The words, uint32 [..., W]."""
    width = are_members.shape[-1]
    padding = [(0, 0)] * (are_members.ndim - 1) + [(0, -width % 32)]
    padded = np.pad(are_members, padding)
    bytes_ = np.packbits(padded, axis=-1, bitorder="little")
    return bytes_.view("<u4")


def check_ranges(module: ModuleType, width: int) -> None:
    rng = Draw(width)
    begin, end = (rng.randint(0, width + 1, (9, 1, 1)) for _ in range(2))
    first = 32 * np.arange(module.words_for(width))[None, :, None]
    words = module.ranges(*(jnp.asarray(x, jnp.int32) for x in (begin, end, first)))
    tiles = np.arange(width)
    expected = (begin[..., 0] <= tiles) & (tiles < end[..., 0])
    np.testing.assert_array_equal(np.asarray(words)[..., 0], words_of(expected))


def check_any_and_all(module: ModuleType, width: int) -> None:
    some, every = (words_of(drawn(width, seed)) for seed in (width, width + 1))
    found = module.any_and_all(jnp.asarray(some), jnp.asarray(every))
    np.testing.assert_array_equal(found[0], np.bitwise_or.reduce(some, axis=-1))
    np.testing.assert_array_equal(found[1], np.bitwise_and.reduce(every, axis=-1))


def check_has(module: ModuleType, width: int) -> None:
    expected, rng = drawn(width, width), Draw(width)
    row, tile = rng.randint(0, SETS, (3, 8)), rng.randint(0, width, (3, 8))
    numbers = (jnp.asarray(x, jnp.int32) for x in (row, tile))
    found = module.has(jnp.asarray(words_of(expected)), *numbers)
    np.testing.assert_array_equal(found, expected[:, row, tile])


def check_packed(module: ModuleType, width: int) -> None:
    expected = drawn(width, width)
    padded = np.pad(expected, ((0, 0), (0, 0), (0, -width % 32)))
    np.testing.assert_array_equal(module.packed(jnp.asarray(padded)), words_of(expected))


def check_members(module: ModuleType, width: int) -> None:
    expected = drawn(width, width)
    first = np.arange(3, 3 + SETS, dtype=np.int32)
    counts, found = module.members(jnp.asarray(words_of(expected)), jnp.asarray(first), width)
    assert counts.dtype == found.dtype == np.int32 and found.shape == expected.shape
    for b, i in np.ndindex(BATCH, SETS):
        places = first[i] + np.flatnonzero(expected[b, i])
        assert counts[b, i] == len(places)
        np.testing.assert_array_equal(found[b, i, : len(places)], places)
        assert (found[b, i, len(places) :] == 0).all()


CHECKS = (check_ranges, check_any_and_all, check_has, check_packed, check_members)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("check", CHECKS)
def test_sets_are_those_of_numpy(check, width):
    check(tile_bits, width)


MUTANTS = {
    "a range with its end": ("_below(end - first)", "_below(end - first + 1)"),
    "a range without its begin": ("~_below(begin - first)", "~_below(begin - first + 1)"),
    "tiles before the words": ("np.int32(0), tile, np", "np.int32(0), abs(tile), np"),
    "a word that is never full": ("(1 + (tile >> 5))", "1"),
    "any for all": ("x[1] & y[1]", "x[1] | y[1]"),
    "all for any": ("x[0] | y[0]", "x[0] & y[0]"),
    "the neighbour's bit": ("lax.rem(tile, jnp", "lax.rem(tile + 1, jnp"),
    "the first word alone": ("row * count + lax.div(tile, jnp.int32(BITS))", "row * count"),
    "bits not moved": ("bits << place", "bits"),
    "the word after": ("(place < end)", "(place <= end)"),
    "words before not counted": ("end - sizes, end, bits", "0 * end, end, bits"),
    "places inside the word": ("before = BITS *", "before = 0 *"),
    "not the first": ("found = first[None, :, None] + ", "found = "),
    "a member too far": ("is_past = number >= skipped", "is_past = number > skipped"),
    "entries past the end": ("lax.select(word != 0, found, jnp.zeros_like(found))", "found"),
    "words without those before": ("np.tri(count,", "np.eye(count,"),
    "half of a word": ("(16, 8, 4, 2, 1)", "(8, 4, 2, 1)"),
}  # fmt: skip
"""Wrong sets: what is wrong, and the text that makes it so."""


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_sets_are_noticed(name):
    wrong = mutant(tile_bits, *MUTANTS[name])
    assert any(fails(partial(check, wrong, width)) for check in CHECKS for width in WIDTHS)
