"""Ready-made mask_mods against their definitions: prefixes, documents, windows and grids."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import explain, mods
from attn_dispatch.programs.key_ranges import key_range
from attn_dispatch.programs.tracing import trace
from tests.support.ready_made_mods import (
    KEY,
    RNG,
    B,
    H,
    N,
    S,
    T,
    V,
    assert_masks,
    normal,
    pairs,
    s,
    t,
)


def test_prefix_lm_agrees_with_its_definition():
    lengths = np.array([3, 0])
    mask = (s <= t) | (s < lengths[:, None, None, None])
    assert_masks(mods.prefix_lm(lengths), mask)


@pytest.mark.parametrize("length", [3, np.int32(3), jnp.array(3)], ids=lambda x: type(x).__name__)
def test_prefix_lm_of_one_number_holds_for_every_row(length: Any):
    """Kernels see in it what they see in an array: the range of keys, and the same verdicts."""
    mod, each = mods.prefix_lm(length), mods.prefix_lm([3] * B)
    assert_masks(mod, (s <= t) | (s < 3))
    ranges = [key_range(trace("mask_mod", x, (), "float32").program) for x in (mod, each)]
    assert [(x.band, x.is_band, bool(x.rest)) for x in ranges] == [((None, None), False, False)] * 2
    q = jax.ShapeDtypeStruct((B, 1024, 8, 128), jnp.bfloat16)
    for target in ("h100", "mi300x"):
        one, several = (explain(q, q, q, mask_mod=x, target=target) for x in (mod, each))
        for verdicts in ("forward", "backward"):
            texts = [[str(x) for x in getattr(y, verdicts)] for y in (one, several)]
            assert texts[0] == texts[1]
        assert one.mask == several.mask


def test_document_mask_agrees_with_its_definition():
    """Documents in any order and of any sign; one query's document has no key."""
    queries, keys = (RNG.integers(-1, 3, (B, x)) for x in (T, S))
    queries[0, 4] = 9
    mask = queries[:, None, :, None] == keys[:, None, None, :]
    assert_masks(mods.document_mask(queries, keys), mask)
    mask = keys[:, None, :, None] == keys[:, None, None, :]
    assert_masks(mods.document_mask(keys), mask, q=normal(B, S, N, H))


@pytest.mark.parametrize(("left", "dilation"), [(6, 3), (5, 2), (0, 1), (4, 1)])
def test_dilated_window_agrees_with_its_definition(left: int, dilation: int):
    seen = [[j in range(i, max(i - left, 0) - 1, -dilation) for j in range(S)] for i in range(T)]
    assert_masks(mods.dilated_window(left, dilation), seen)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_window_agrees_with_its_definition(chunk: int):
    assert_masks(mods.chunked_window(chunk), (s <= t) & (t // chunk == s // chunk))


@pytest.mark.parametrize(("height", "width", "radius"), [(5, 7, 1), (5, 6, 2), (3, 4, 0)])
def test_neighborhood_is_a_square_of_the_grid(height: int, width: int, radius: int):
    seen = pairs(mods.neighborhood_2d(height, width, radius), height * width, height * width)
    side = 2 * radius + 1
    for row, column in itertools.product(range(height), range(width)):
        # The query is in the middle of the square, unless the square would cross a border.
        top = min(max(row - radius, 0), height - side)
        left = min(max(column - radius, 0), width - side)
        expected = np.zeros((height, width), bool)
        expected[top : top + side, left : left + side] = True
        np.testing.assert_array_equal(
            seen[row * width + column].reshape(height, width), expected, f"{row}, {column}"
        )
    assert (seen.sum(axis=1) == side**2).all()


def test_neighborhood_agrees_with_its_definition():
    rows, columns = np.divmod(np.arange(12), 4)
    # A square of 3 x 3 in a grid of 3 x 4.
    tops, lefts = np.clip(rows - 1, 0, 0), np.clip(columns - 1, 0, 1)
    mask = (tops[:, None] <= rows) & (lefts[:, None] <= columns) & (columns <= lefts[:, None] + 2)
    assert_masks(mods.neighborhood_2d(3, 4, 1), mask, normal(B, 12, N, H), KEY[:, :12], V[:, :12])
