"""Masks as intervals, against the same masks over all pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics.intervals import Intervals, has_ranges, is_certain
from attn_dispatch.semantics.key_bands import KeyBand
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch_tools.verify.reference import allowed as reference_allowed
from tests.support.interval_calls import (
    BATCH,
    MODS,
    Arrays,
    Draw,
    IntervalCall,
    dense,
    drawn_calls,
    runs,
)

DRAWS = 6
ALL = drawn_calls(96, 3)
CALLS = [x for x in ALL if has_ranges(x.spec(x.draw(Draw(0))))]


def found_and_mask(call: IntervalCall, draws: int, seed: int) -> list[Any]:
    """For each drawing of the arrays: Intervals, the mask bool [B, T, S], the spec, the arrays."""
    rng = Draw(seed)
    spec = call.spec(call.draw(rng))
    assert has_ranges(spec)

    @jax.jit
    def both(operands: dict[str, jax.Array]) -> Any:
        found = Intervals.of(spec, operands)
        mask = allowed(spec, operands, Positions.of(spec, operands))
        mask = True if mask is None else mask[:, 0]
        shape = (BATCH, call.t, call.s)
        return found.rows, found.unknown, jnp.broadcast_to(jnp.asarray(mask), shape)

    # What cannot differ between drawings is not among the results of the compiled function.
    most = Intervals.of(spec, {x: jnp.asarray(y) for x, y in call.draw(Draw(seed)).items()}).most
    made = []
    for _ in range(draws):
        arrays = call.draw(rng)
        with jax.numpy_rank_promotion("raise"):
            rows, unknown, mask = both({x: jnp.asarray(y) for x, y in arrays.items()})
        made.append((Intervals(rows, unknown, most), np.asarray(mask), spec, arrays))
    return made


def check(found: Intervals, mask: np.ndarray) -> bool:
    """Assert that the intervals are the mask; returns whether they are known to be."""
    rows = np.asarray(found.rows)
    keys = mask.shape[2]
    assert rows.dtype == np.int32 and rows.shape[1:] == (mask.shape[1], 4)
    assert (rows[..., ::2] >= 0).all() and (rows[..., ::2] <= keys).all()
    assert (rows[..., 1::2] >= 0).all()
    is_hidden = found.unknown is not None and bool(found.unknown)
    if found.most is not None or is_hidden is False:
        assert is_hidden or runs(mask).max() <= (2 if found.most is None else found.most)
    if is_hidden:
        return False
    np.testing.assert_array_equal(np.broadcast_to(dense(rows, keys), mask.shape), mask)
    # The normal form: in order, a key between both, empty ones are (0, 0).
    a, length_a, b, length_b = (rows[..., i] for i in range(4))
    assert ((length_b == 0) | ((length_a > 0) & (b > a + length_a))).all()
    assert (a[length_a == 0] == 0).all() and (b[length_b == 0] == 0).all()
    return True


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_drawn_calls_agree_with_the_mask_over_all_pairs(number):
    call = CALLS[number]
    for found, mask, spec, arrays in found_and_mask(call, DRAWS, number):
        is_known = check(found, mask)
        if not is_known:
            assert may_be_unknown(call, mask, arrays)
        if not call.mod:
            np.testing.assert_array_equal(reference_allowed(spec.options, arrays)[:, 0], mask)
        band = KeyBand.of(spec)
        distance = np.arange(call.s) - np.arange(call.t)[:, None]
        outside = np.zeros_like(distance, bool)
        outside |= distance < (-99 if band.low is None else band.low)
        outside |= distance > (99 if band.high is None else band.high)
        assert not (mask & outside).any()


def may_be_unknown(call: IntervalCall, mask: np.ndarray, arrays: Arrays) -> bool:
    """Whether rows have more than two intervals, or equal entries of an array are no neighbours."""
    groups = [x for name, x in arrays.items() if name == "mask_mod_0" and x.ndim == 3]
    ids = [arrays["key_value_segment_ids"]] if call.layout == "ids" else []
    are_scattered = any(
        runs(row == value).max() > 1
        for x in [*ids, *(y[0] for y in groups)]
        for row in x
        for value in range(1, 5)
    )
    return runs(mask).max() > 2 or are_scattered


def test_drawn_calls_are_of_all_kinds():
    assert len(CALLS) * DRAWS >= 300
    assert {x.mod for x in ALL} == {"", *MODS}
    assert {x.mod for x in ALL} - {x.mod for x in CALLS} == {"dilated", "dilated prefix", "product"}
    assert {x.layout for x in CALLS} == {"plain", "lengths", "segments", "ids", "same", "cu"}
    assert {is_certain(x.spec(x.draw(Draw(0)))) for x in CALLS if x.mod} == {True, False}


@pytest.mark.parametrize(
    ("call", "most", "is_sure"),
    [
        (IntervalCall("plain", 9, 12), 1, True),
        (IntervalCall("plain", 9, 12, {"is_causal": True}), 1, True),
        (IntervalCall("cu", 9, 12, {"window": (2, 1)}), 1, True),
        (IntervalCall("ids", 9, 12), 1, False),
        (IntervalCall("plain", 9, 12, mod="window and sinks"), 2, True),
        (IntervalCall("plain", 9, 12, mod="prefix"), 1, True),
        (IntervalCall("plain", 9, 12, mod="no keys"), 1, True),
        (IntervalCall("plain", 9, 12, mod="not the own key"), 2, True),
        (IntervalCall("plain", 9, 12, mod="documents"), 1, False),
        (IntervalCall("plain", 9, 12, mod="three ranges"), None, False),
        (IntervalCall("plain", 9, 12, mod="equal chunks"), 1, False),
    ],
    ids=str,
)
def test_static_bounds_of_intervals(call, most, is_sure):
    arrays = call.draw(Draw(0))
    found = Intervals.of(call.spec(arrays), {x: jnp.asarray(y) for x, y in arrays.items()})
    assert (found.most, found.unknown is None) == (most, is_sure)


def test_masks_without_lengths_are_shared_by_the_batch():
    for mod in ("", "window and sinks", "not the own key"):
        call = IntervalCall("plain", 12, 9, {"is_causal": True}, mod)
        arrays = call.draw(Draw(0))
        found = Intervals.of(call.spec(arrays), {x: jnp.asarray(y) for x, y in arrays.items()})
        assert found.rows.shape[0] == 1
