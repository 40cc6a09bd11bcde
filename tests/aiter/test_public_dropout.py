"""Dropout in the public call on AITER."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import (
    dot_product_attention,
    dropout_mask,
    explain,
)
from attn_dispatch.aiter.arrays import rng_state
from attn_dispatch.core.rewrites import rewrite
from tests.support.aiter_public import arrays, assert_close, value_and_gradients

pytestmark = pytest.mark.usefixtures("emulator")


def test_dropout_depends_on_the_key_alone():
    def call(seed: int):
        options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(seed)}
        return value_and_gradients(*arrays(), **options)

    first, again, other = call(1), call(1), call(2)
    for x, y, z in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(x, y)
        assert (x != z).mean() > 0.5


def test_dropout_under_jit_takes_the_key_as_an_operand(emulator):
    @jax.jit
    def call(key):
        return dot_product_attention(*arrays(), dropout_rate=0.5, dropout_key=key)

    assert (call(jax.random.key(1)) != call(jax.random.key(2))).any()
    assert emulator.calls("forward") == 2


SOFT_CAP_AND_DROPOUT: dict[str, Any] = {
    "logits_soft_cap": 2.0, "dropout_rate": 0.5, "dropout_key": jax.random.key(1)
}  # fmt: skip


@pytest.mark.parametrize("s", [40, 300])
def test_xlas_backward_pass_uses_the_dropout_mask_of_aiters_forward_pass(emulator, s):
    with attn_dispatch.fallback("silent"):
        got = value_and_gradients(*arrays(s=s), **SOFT_CAP_AND_DROPOUT)
    # One call computes the result, and one more reads the mask of each 96 keys.
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1 + -(-s // 96), 0)
    keep = dropout_mask(*arrays(s=s), **SOFT_CAP_AND_DROPOUT)
    q, k, v = (x.astype(jnp.float32) for x in arrays(s=s))

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        score = 2 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) / 4 / 2)
        weight = jnp.where(keep, 2 * jax.nn.softmax(score), 0)
        return jnp.einsum("bnts,bsnh->btnh", weight, v)

    out, pull = jax.vjp(dense, q, k, v)
    assert_close(got, [np.asarray(x) for x in (out, *pull(out))])


def test_aiter_does_not_run_a_call_whose_dropout_mask_is_too_large_to_read(emulator, monkeypatch):
    """XLA's backward pass cannot draw the mask of AITER's forward pass."""
    monkeypatch.setattr(rewrite, "MAX_PAIR_ENTRIES", 2 * 4 * 24 * 40 - 1)
    with attn_dispatch.fallback("silent"):
        got = value_and_gradients(*arrays(), **SOFT_CAP_AND_DROPOUT)
        assert (emulator.calls("forward"), emulator.calls("backward")) == (0, 0)
        dot_product_attention(*arrays(), **SOFT_CAP_AND_DROPOUT)
    assert emulator.calls("forward") == 0  # without gradients neither
    assert_close(got, value_and_gradients(*arrays(), **SOFT_CAP_AND_DROPOUT, implementation="xla"))


@pytest.mark.filterwarnings("ignore:attention may fall back")
def test_the_dropout_mask_follows_the_bias_that_decides_at_run_time(emulator):
    """With each bias the mask is that of the implementation that computes the call."""
    options: dict[str, Any] = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)}
    masks = []
    with attn_dispatch.fallback("warn"):
        for bias in (np.ones((4, 24, 40), np.float32), np.full((4, 24, 40), 0.1, np.float32)):
            masks.append(dropout_mask(*arrays(), bias=bias, **options))
            values = [*arrays()[:2], jnp.ones_like(arrays()[2])]
            out = dot_product_attention(*values, bias=bias, **options)
            dead = ~masks[-1].any(axis=3)
            assert not np.asarray(out)[np.asarray(dead.swapaxes(1, 2))].any()
    assert (masks[0] != masks[1]).any()
    xlas = dropout_mask(*arrays(), **options, implementation="xla")
    np.testing.assert_array_equal(masks[1], xlas)


@pytest.mark.parametrize("rate", [0.99, 0.999, 0.9999999])
def test_a_dropout_rate_that_8_bits_do_not_hold_is_refused(rate):
    options: dict[str, Any] = {"dropout_rate": rate, "dropout_key": jax.random.key(1)}
    with pytest.raises(NotImplementedError, match="CK decides with 8 bits"):
        dot_product_attention(*arrays(), **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_mask_reads_the_mask_of_aiter_in_several_calls(emulator, rate, dtype):
    """One call reads the mask of 96 keys, 6 for each of the 16 columns of value."""
    options: dict[str, Any] = {"dropout_rate": rate, "dropout_key": jax.random.key(1)}
    qkv = [x.astype(dtype) for x in arrays(s=1000)]
    spec = explain(*qkv, **options).call
    key = {"dropout_key": jax.random.key_data(options["dropout_key"])[None]}
    words = np.asarray(rng_state(spec, key)).view(np.uint64)
    drawn = emulator.keep(tuple(map(int, words)), rate, (2, 4, 24, 1000))
    for further in ({}, {"alibi_slopes": jnp.arange(4.0)}, {"sinks": jnp.arange(4.0) * 30}):
        np.testing.assert_array_equal(dropout_mask(*qkv, **options, **further), drawn)
