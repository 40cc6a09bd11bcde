"""The dropout mask depends on key and position alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.dropout import dropout_keep_mask, dropout_row_keys
from attn_dispatch.spec import AttentionOptions, AttentionSpec


def spec_of(b: int, keys: Any, impl: str, rate: float = 0.3, t: int = 6, s: int = 9) -> Any:
    shapes = {"query": (b, t, 4, 8), "key": (b, s, 2, 8), "value": (b, s, 2, 8)}
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    options = AttentionOptions(
        operands=(*shapes, "dropout_key"), scale=1.0, dropout_rate=rate, dropout_impl=impl
    )
    return AttentionSpec.of([*avals, keys], options)


def mask(b: int, keys: Any, impl: str, start: int = 0, size: int = 6, **more: Any) -> np.ndarray:
    spec = spec_of(b, keys, impl, **more)
    row_keys = dropout_row_keys(spec, {"dropout_key": keys})
    assert row_keys is not None
    return np.asarray(dropout_keep_mask(spec, row_keys, start, size))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_each_key_draws_what_it_would_alone(impl):
    keys = jax.random.key_data(jax.random.split(jax.random.key(3, impl=impl), 3))
    together = mask(6, keys, impl)
    assert together.shape == (6, 4, 6, 9)
    for d in range(3):
        np.testing.assert_array_equal(together[2 * d : 2 * d + 2], mask(2, keys[d : d + 1], impl))
    assert (together[:2] != together[2:4]).any()
    assert (together[0] != together[1]).any()


def test_rows_are_the_same_whichever_chunk_draws_them():
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 2))
    whole = mask(4, keys, "threefry2x32")
    part = mask(4, keys, "threefry2x32", start=1, size=4)
    np.testing.assert_array_equal(part, whole[:, :, 1:5])


@pytest.mark.parametrize("rate", [0.001, 0.3, 0.9])
def test_rate(rate):
    keys = jax.random.key_data(jax.random.key(5))[None]
    dropped = ~mask(2, keys, "threefry2x32", rate=rate, t=200, s=200, size=200)
    spread = np.sqrt(rate * (1 - rate))
    assert abs(dropped.mean() - rate) < 5 * spread / np.sqrt(dropped.size)
    # Neither rows, heads nor keys are drawn alike.
    for axis in range(dropped.ndim):
        count = dropped.size / dropped.shape[axis]
        others = tuple(i for i in range(dropped.ndim) if i != axis)
        assert np.abs(dropped.mean(axis=others) - rate).max() < 6 * spread / np.sqrt(count)
    for axis in range(dropped.ndim):
        both = dropped & np.roll(dropped, 1, axis=axis)
        assert abs(both.mean() - rate**2) < 6 * spread / np.sqrt(dropped.size)


def test_no_dropout_no_keys():
    keys = jax.random.key_data(jax.random.key(5))[None]
    spec = spec_of(2, keys, "threefry2x32", rate=0.0)
    assert dropout_row_keys(spec, {"dropout_key": keys}) is None
