"""Arrays of more than 2^31 elements: each batch row must equal the result of that row alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 33, 131072, 64, 8, 64
assert BATCH * LENGTH * KV_HEADS * HEAD_DIM > 2**31


def caches() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (1, LENGTH, KV_HEADS, HEAD_DIM)
    row = 1 + jnp.arange(BATCH, dtype=jnp.bfloat16)[:, None, None, None] / BATCH
    query = jax.random.normal(keys[0], (BATCH, 1, HEADS, HEAD_DIM), jnp.bfloat16)
    # Keys and values differ between batch rows, without random numbers for all of them.
    key, value = (jax.random.normal(x, shape, jnp.bfloat16) * row for x in keys[1:])
    return query, key, value


def attend(query, key, value, **options):
    return attn_dispatch.dot_product_attention(query, key, value, implementation="cudnn", **options)


@pytest.mark.parametrize("options", ["plain", "window"])
def test_decoding_from_a_large_cache_equals_single_rows(options: str, record):
    given = {"plain": {}, "window": {"local_window_size": (5000, 0), "is_causal": True}}[options]
    given |= {"causal_alignment": "bottom_right"} if options == "window" else {}
    arrays = jax.jit(caches)()
    out = jax.jit(lambda *x: attend(*x, **given))(*arrays)
    alone = jax.jit(lambda *x: attend(*x, **given))
    worst = 0.0
    for row in (0, BATCH // 2, BATCH - 1):
        expected = np.asarray(alone(*(x[row : row + 1] for x in arrays)), np.float64)
        got = np.asarray(out[row : row + 1], np.float64)
        worst = max(worst, float(np.abs(got - expected).max()))
        assert np.abs(expected).max() > 1e-3
    record(call=options, worst=worst)
    assert worst <= 2**-8


def test_offsets_beyond_32_bits_are_refused():
    """One query with sinks runs as a packed call, whose offsets are 32-bit numbers."""
    shapes = [x.shape for x in jax.eval_shape(caches)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    given = {
        "sinks": jax.ShapeDtypeStruct((HEADS,), jnp.float32),
        "implementation": ("cudnn", "xla"),
    }
    with attn_dispatch.rewrites(False):
        explained = attn_dispatch.explain(*arrays, **given)
    assert explained.chosen_forward == "xla"
    small = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in arrays]
    assert attn_dispatch.explain(*small, **given).chosen_forward == "cudnn"
