"""Masks as intervals, against the same masks over all pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics import intervals
from attn_dispatch.semantics.diagonal import KeyBand
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch_tools.verify.reference import allowed as reference_allowed
from tests.support.interval_calls import (
    BATCH,
    MODS,
    Draw,
    IntervalCall,
    dense,
    drawn_calls,
    runs,
)

DRAWS = 6
ALL = drawn_calls(160, 3)
CALLS = [x for x in ALL if has_intervals(x.spec(x.draw(Draw(0))))]


def check(rows: np.ndarray, mask: np.ndarray) -> None:
    """Assert that the rows are the mask, bool [B, T, S], in their normal form."""
    keys = mask.shape[2]
    assert rows.dtype == np.int32 and rows.shape[1:] == (mask.shape[1], 4)
    assert (rows[..., ::2] >= 0).all() and (rows[..., ::2] <= keys).all()
    assert (rows[..., 1::2] >= 0).all()
    np.testing.assert_array_equal(np.broadcast_to(dense(rows, keys), mask.shape), mask)
    a, length_a, b, length_b = (rows[..., i] for i in range(4))
    assert ((length_b == 0) | ((length_a > 0) & (b > a + length_a))).all()
    assert (a[length_a == 0] == 0).all() and (b[length_b == 0] == 0).all()


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_drawn_calls_agree_with_the_mask_over_all_pairs(number):
    call, rng = CALLS[number], Draw(number)
    spec = call.spec(call.draw(rng))

    @jax.jit
    def both(operands: dict[str, jax.Array]) -> Any:
        mask = allowed(spec, operands, Positions.of(spec, operands))
        mask = jnp.asarray(True if mask is None else mask[:, 0])
        return intervals.rows(spec, operands), jnp.broadcast_to(mask, (BATCH, call.t, call.s))

    for _ in range(DRAWS):
        arrays = call.draw(rng)
        with jax.numpy_rank_promotion("raise"):
            rows, mask = map(np.asarray, both({x: jnp.asarray(y) for x, y in arrays.items()}))
        check(rows, mask)
        if not call.mod:
            np.testing.assert_array_equal(reference_allowed(spec.options, arrays)[:, 0], mask)
        band = KeyBand.of(spec)
        distance = np.arange(call.s) - np.arange(call.t)[:, None]
        outside = np.zeros_like(distance, bool)
        outside |= distance < (-99 if band.low is None else band.low)
        outside |= distance > (99 if band.high is None else band.high)
        assert not (mask & outside).any()


def test_drawn_calls_are_of_all_kinds():
    assert len(CALLS) * DRAWS >= 300
    assert {x.mod for x in ALL} == {"", *MODS}
    assert {x.mod for x in CALLS} == {
        "", "window and sinks", "prefix", "chunks", "not the own key", "no keys", "by query alone"
    }  # fmt: skip
    assert {x.layout for x in CALLS} == {"plain", "lengths", "segments", "same", "cu"}


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (IntervalCall("plain", 9, 12), 1),
        (IntervalCall("plain", 9, 12, {"is_causal": True}), 1),
        (IntervalCall("cu", 9, 12, {"window": (2, 1)}), 1),
        (IntervalCall("ids", 9, 12), None),
        (IntervalCall("plain", 9, 12, mod="window and sinks"), 2),
        (IntervalCall("plain", 9, 12, mod="prefix"), 1),
        (IntervalCall("plain", 9, 12, mod="no keys"), 1),
        (IntervalCall("plain", 9, 12, mod="not the own key"), 2),
        (IntervalCall("plain", 9, 12, mod="documents"), None),
        (IntervalCall("plain", 9, 12, mod="three ranges"), None),
        (IntervalCall("plain", 9, 12, mod="equal chunks"), None),
    ],
    ids=str,
)
def test_most_intervals_of_a_row(call, most):
    arrays = call.draw(Draw(0))
    spec = call.spec(arrays)
    assert has_intervals(spec) == (most is not None)
    if most is not None:
        ranges = intervals.ranges(spec, {x: jnp.asarray(y) for x, y in arrays.items()})
        assert len(ranges) == most


def test_masks_without_lengths_are_shared_by_the_batch():
    for mod in ("", "window and sinks", "not the own key"):
        call = IntervalCall("plain", 12, 9, {"is_causal": True}, mod)
        arrays = call.draw(Draw(0))
        rows = intervals.rows(call.spec(arrays), {x: jnp.asarray(y) for x, y in arrays.items()})
        assert rows.shape[0] == 1


@pytest.mark.parametrize("count", [1, 2])
def test_union_of_drawn_ranges(count):
    rng, keys = Draw(count), 12
    begins, ends = rng.randint(0, keys + 1, (2, count, 1, 2000)).astype(np.int32)
    ranges = [(jnp.asarray(x), jnp.asarray(y)) for x, y in zip(begins, ends, strict=True)]
    places = np.arange(keys)
    mask = ((places >= begins[..., None]) & (places < ends[..., None])).any(axis=0)
    rows = np.asarray(intervals.rows_of(ranges, 2000))
    check(rows, mask)
    np.testing.assert_array_equal((rows[..., 1::2] > 0).sum(axis=2), runs(mask))
