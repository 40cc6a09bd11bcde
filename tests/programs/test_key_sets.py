"""The ranges of keys of a mask_mod, read from its program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import mods
from attn_dispatch.programs.bounded_numbers import Borders, Number
from attn_dispatch.programs.key_ranges import MAX_RANGES, key_set
from attn_dispatch.programs.tracing import trace

LIMITS = jnp.array([3, 6])
ROWS = jnp.array([[0, 0, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 0, 0, 2, 2, 2, 2]])
B, N, T, S = 2, 2, 9, 8
FAR = jnp.array(2**31 - 1)


def stripes(b, n, t, s):
    found = s < 1
    for i in range(1, MAX_RANGES):
        found = found | ((s >= 3 * i) & (s < 3 * i + 1))
    return found


# Name: the mask, and its number of ranges; None if it is no set of ranges.
MASKS = {
    "causal": (lambda b, n, t, s: s <= t, 1),
    "window": (lambda b, n, t, s: (t - s < 5) & (s <= t), 1),
    "window and sinks": (lambda b, n, t, s: ((t - s < 4) | (s < 2)) & (s <= t), 2),
    "prefix": (mods.prefix_lm(LIMITS), 1),
    "all but a few": (lambda b, n, t, s: (s < t - 3) | (s > LIMITS[b]), 2),
    "a few": (lambda b, n, t, s: ~((s < t - 3) | (s > LIMITS[b])), 1),
    "not the own key": (lambda b, n, t, s: s != t, 2),
    "far from the query": (lambda b, n, t, s: ~(jnp.abs(s - t) < 2), 2),
    "of each head": (lambda b, n, t, s: jnp.where(n == 0, s <= t, s > t), 2),
    "where in a range": (lambda b, n, t, s: jnp.where(s < 3, s < t, s > LIMITS[b]), 2),
    "all": (lambda b, n, t, s: jnp.bool_(True), 1),
    "none": (lambda b, n, t, s: ~((s < 5) | (s >= 5)), 1),
    "documents": (mods.document_mask(ROWS), None),
    "chunks": (lambda b, n, t, s: s // 4 == t // 4, None),
    "documents and prefix": (
        lambda b, n, t, s: (s < LIMITS[b]) | ((ROWS[b, s] == ROWS[b, t]) & (s <= t)), None
    ),
    "stripes": (stripes, MAX_RANGES),
    "too many stripes": (lambda b, n, t, s: stripes(b, n, t, s) | ((s > 30) & (s < t)), None),
    "other documents": (lambda b, n, t, s: ROWS[b, s] != ROWS[b, t], None),
    "not a document": (lambda b, n, t, s: ~(ROWS[b, s] == ROWS[b, t]), None),
    "sums that wrap around": (lambda b, n, t, s: s != t + FAR, 2),
    "positions that wrap around": (lambda b, n, t, s: s + jnp.int32(2**31 - 1) != t, None),
    "floats": (lambda b, n, t, s: s.astype(jnp.float32) < 3.5, None),
    "product": (lambda b, n, t, s: s * t < 9, None),
}  # fmt: skip


@pytest.mark.parametrize(("function", "ranges"), MASKS.values(), ids=MASKS)
def test_ranges_agree_with_the_mask(function, ranges):
    mod = trace("mask_mod", function, (), "float32")
    found = key_set(mod.program)
    assert (None if found is None else len(found)) == ranges
    if found is None:
        return
    b, n, t, s = np.ogrid[:B, :N, :T, :S]
    expected = np.vectorize(lambda *at: bool(function(*map(jnp.int32, at))))(b, n, t, s)

    def number(x: Number) -> np.ndarray:
        inputs = [x.astype(np.int32) for x in (b, n, t, s)]
        return np.vectorize(lambda *at: int(x.compute(*map(jnp.int32, at), *mod.arrays)))(*inputs)

    def keys(borders: Borders) -> np.ndarray:
        got = np.ones_like(expected)
        if borders.first is not None:
            got &= s >= number(borders.first)
        if borders.end is not None:
            got &= s < number(borders.end)
        return got

    np.testing.assert_array_equal(np.any([keys(x) for x in found], axis=0), expected)
