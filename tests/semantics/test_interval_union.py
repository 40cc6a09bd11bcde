"""Unions of ranges as at most two intervals."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics.interval_union import any_of, union
from tests.support.interval_calls import Draw, dense, runs

KEYS = 12


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_union_of_drawn_ranges(count):
    rng = Draw(count)
    begins, ends = rng.randint(0, KEYS + 1, (2, count, 2000)).astype(np.int32)
    ranges = [(jnp.asarray(x), jnp.asarray(y)) for x, y in zip(begins, ends, strict=True)]
    rows, has_more = union(ranges)
    places = np.arange(KEYS)
    mask = ((places >= begins[..., None]) & (places < ends[..., None])).any(axis=0)
    number = runs(mask)
    assert (has_more is None) == (count <= 2)
    if has_more is not None:
        np.testing.assert_array_equal(has_more, number > 2)
    is_known = number <= 2
    np.testing.assert_array_equal(dense(rows, KEYS)[is_known], mask[is_known])
    np.testing.assert_array_equal(
        (np.asarray(rows)[:, 1::2] > 0).sum(axis=1), np.minimum(number, 2)
    )
    start, length, second, second_length = np.asarray(rows).T
    has_second = second_length > 0
    assert (start + length < second)[has_second].all() and (length[has_second] > 0).all()


def test_no_ranges_are_an_error():
    with pytest.raises(ValueError, match="expected one range or more, got none"):
        union([])


def test_flags_that_may_be_absent():
    yes, no = jnp.asarray(True), jnp.asarray(False)
    assert any_of(None, None) is None
    assert any_of(None, no) is no
    found = any_of(no, None, yes)
    assert found is not None and bool(found)
