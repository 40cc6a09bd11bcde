"""Rows and lists of static bands, judged by the dense mask of each band."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attn_dispatch.semantics.band_masks import band_lists, band_rows, rows_bytes, static_band
from attn_dispatch.semantics.diagonal import KeyBand
from attn_dispatch.semantics.tile_lists import TileLists
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.interval_calls import dense
from tests.support.tile_grids import GRIDS, Lengths, judge, kinds_of

BANDS = (*GRIDS, Lengths(64, 64, (16, 16), (None, 0)), Lengths(33, 70, (16, 32), (-20, None)))


def seen(grid: Lengths) -> np.ndarray:
    """bool [T, S]: the key is in the band."""
    low, high = grid.band
    distance = np.arange(grid.keys) - np.arange(grid.queries)[:, None]
    return (distance >= (-np.inf if low is None else low)) & (
        distance <= (np.inf if high is None else high)
    )


@pytest.mark.parametrize("grid", BANDS, ids=str)
def test_rows_and_lists_are_those_of_the_band(grid: Lengths):
    band, made = KeyBand(*grid.band), grid.grid()
    rows = band_rows(grid.queries, grid.keys, band)
    assert rows.dtype == np.int32 and rows.nbytes == rows_bytes(grid.queries)
    mask = seen(grid)[None]
    np.testing.assert_array_equal(dense(rows, grid.keys), mask)
    assert (rows[0, ~mask[0].any(axis=1)] == 0).all(), "an empty interval is (0, 0)"
    kinds = kinds_of(mask, grid.tile)
    for is_backward in (False, True):
        lists = band_lists(made, band, is_backward=is_backward)
        size = made.backward_bytes(1) if is_backward else made.forward_bytes(1)
        assert sum(x.nbytes for x in lists) == size
        judge(TileLists(*lists), kinds.swapaxes(1, 2) if is_backward else kinds)


CALL = Case("band/x", b=2, t=40, s=50, is_causal=True)


@pytest.mark.parametrize(
    ("case", "band"),
    [
        (CALL, KeyBand(None, 0)),
        (replace(CALL, is_causal=False), KeyBand()),
        (replace(CALL, alignment="bottom_right"), KeyBand(None, 10)),
        (replace(CALL, is_causal=False, window=(4, 2)), KeyBand(-4, 2)),
        (replace(CALL, offsets=(3, 4)), None),
        (replace(CALL, q_lengths=(30, 7), kv_lengths=(50, 20)), None),
        (replace(CALL, q_segments=((1,) * 40,) * 2, kv_segments=((1,) * 50,) * 2), None),
        (replace(CALL, window_arrays=((3, 0),)), None),
        (replace(CALL, mask=(2, 1, 40, 50)), None),
    ],
    ids=str,
)
def test_a_mask_of_arrays_is_no_static_band(case: Case, band: KeyBand | None):
    assert static_band(spec_of(case.forward_options(), case.avals())) == band
