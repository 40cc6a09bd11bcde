"""The range of keys that a mask_mod lets a query attend to, read from its program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import mods
from attn_dispatch.programs.bounded_numbers import Number
from attn_dispatch.programs.key_ranges import key_range
from attn_dispatch.programs.program import ModProgram
from attn_dispatch.programs.tracing import trace

PREFIX = jnp.array([3, 6])
LIMIT = jnp.array(2**31 - 1)
B, N, T, S = 2, 2, 9, 8

# Name: the mask, its band, and True if the mask is exactly the band.
MASKS = {
    "causal": (lambda b, n, t, s: s <= t, (None, 0), True),
    "later keys": (lambda b, n, t, s: t < s, (0, None), False),
    "window": (lambda b, n, t, s: (t - s < 5) & (s <= t), (4, 0), True),
    "window of both sides": (lambda b, n, t, s: jnp.abs(t - s) <= 3, (3, 3), True),
    "window, not outside": (lambda b, n, t, s: ~((t - s > 3) | (s - t >= 2)), (3, 1), True),
    "window of each head": (lambda b, n, t, s: jnp.abs(s - t) <= n, (None, None), False),
    "own key": (lambda b, n, t, s: s == t, (0, 0), True),
    "chunks": (mods.chunked_window(4), (3, 0), False),
    "dilated": (mods.dilated_window(6, 2), (6, 0), False),
    "prefix": (mods.prefix_lm(PREFIX), (None, None), False),
    "prefix of one number": (mods.prefix_lm(3), (None, None), False),
    "lengths": (lambda b, n, t, s: s < PREFIX[b], (None, None), False),
    "causal, lengths": (lambda b, n, t, s: (s <= t) & (s < PREFIX[b]), (None, 0), False),
    "window, lengths": (
        lambda b, n, t, s: (jnp.abs(t - s) < 3) & (s < PREFIX[b]) & (s < 5), (2, 2), False
    ),
    "before the query, lengths": (lambda b, n, t, s: (s < t) & (s < PREFIX[b]), (None, 0), False),
    "long before, lengths": (lambda b, n, t, s: (s < t - 5) & (s < PREFIX[b]), (None, 0), False),
    "later, lengths": (lambda b, n, t, s: (s >= t + 3) & (s < PREFIX[b]), (0, None), False),
    "some queries": (lambda b, n, t, s: (t > 5) & (s <= t), (None, 0), False),
    "some queries attend to all": (lambda b, n, t, s: (t > 5) | (s <= t), (None, None), False),
    "no limit": (lambda b, n, t, s: s <= LIMIT, (None, None), False),
    "all but a few": (lambda b, n, t, s: (s < t - 3) | (s > PREFIX[b]), (None, None), False),
    "a few": (lambda b, n, t, s: ~((s < t - 3) | (s > PREFIX[b])), (3, None), False),
    "window and sinks": (lambda b, n, t, s: ((t - s < 4) | (s < 2)) & (s <= t), (None, 0), False),
    "even keys": (lambda b, n, t, s: (s % 2 == 0) & (s <= t), (None, 0), False),
    "documents": (mods.document_mask(jnp.arange(T)[None] // 5), (None, None), False),
    "unsigned": (lambda b, n, t, s: (t - s).astype(jnp.uint32) <= 3, (None, None), False),
    "unsigned queries": (lambda b, n, t, s: s <= (t - 3).astype(jnp.uint8), (None, None), False),
    "eight bits": (lambda b, n, t, s: (t - s).astype(jnp.int8) <= 3, (None, None), False),
    "unsigned both": (
        lambda b, n, t, s: t.astype(jnp.uint32) - s.astype(jnp.uint32) < 3, (None, None), False
    ),
    "int32 overflow": (
        lambda b, n, t, s: s <= t + jnp.int32(2**31 - 1), (None, None), False
    ),
    "all": (lambda b, n, t, s: jnp.bool_(True), (None, None), False),
}  # fmt: skip


def traced(function) -> tuple[ModProgram, tuple[jax.Array, ...]]:
    mod = trace("mask_mod", function, (), "float32")
    return mod.program, mod.arrays


@pytest.mark.parametrize(("function", "band", "is_band"), MASKS.values(), ids=MASKS)
def test_key_range_agrees_with_the_mask(function, band, is_band):
    program, arrays = traced(function)
    found = key_range(program)
    assert (found.band, found.is_band) == (band, is_band)
    b, n, t, s = np.ogrid[:B, :N, :T, :S]
    expected = np.vectorize(lambda *at: bool(function(*map(jnp.int32, at))))(b, n, t, s)
    got = np.ones_like(expected)

    def number(x: Number) -> np.ndarray:
        inputs = [x.astype(np.int32) for x in (b, n, t, s)]
        return np.vectorize(lambda *at: int(x.compute(*map(jnp.int32, at), *arrays)))(*inputs)

    if found.first is not None:
        got &= s >= number(found.first)
    if found.end is not None:
        got &= s < number(found.end)
    if found.row_end is not None:
        left, right = (T + S if side is None else side for side in found.band)
        in_window = (s >= t - left) & (s <= t + right) & (s < number(found.row_end))
        np.testing.assert_array_equal(np.broadcast_to(in_window, expected.shape), expected)
    if found.rest:
        assert (got | ~expected).all()
    else:
        np.testing.assert_array_equal(got, expected)
    left, right = found.band
    in_band = ((s >= t - left) if left is not None else True) & (
        (s <= t + right) if right is not None else True
    )
    assert (in_band | ~expected).all()
    if is_band:
        np.testing.assert_array_equal(np.broadcast_to(in_band, expected.shape), expected)


def test_masks_that_become_lengths():
    found = {x for x, (function, *_) in MASKS.items() if key_range(traced(function)[0]).row_end}
    assert found == {"lengths", "causal, lengths", "window, lengths", "a few", "no limit", "all"}
