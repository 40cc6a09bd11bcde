"""Blocks of the XLA implementation under x64, and scores so large that rounding dominates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention
from attn_dispatch.xla import blocks


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_blocks_under_x64_give_the_same_results(monkeypatch, dtype: str):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal((4, 6, n, 8)), dtype) for n in (4, 2, 2))

        def value_and_gradients():
            f = lambda q, k, v: dot_product_attention(q, k, v, is_causal=True).sum()  # noqa: E731
            return jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v)

        whole = value_and_gradients()
        monkeypatch.setattr(blocks, "SCORE_BYTES", 64)
        for x, y in zip(*map(jax.tree.leaves, (value_and_gradients(), whole)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
def test_large_scores_give_finite_results(head_dim: int, size: float):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 32, 2, head_dim)), jnp.float32) for _ in "qkv")

    def out_and_gradients(q, k, v):
        out, pull = jax.vjp(dot_product_attention, q, k, v)
        return out, *pull(jnp.ones_like(out))

    out, *gradients = jax.jit(out_and_gradients)(size * q, size * k, v)
    assert np.isfinite(out).all() and all(np.isfinite(x).all() for x in gradients)
    # Each query attends to the key of its largest score, and its probabilities sum to 1.
    best = np.einsum("btnh,bsnh->bnts", q, k).argmax(axis=-1)
    expected = np.take_along_axis(np.swapaxes(v, 1, 2), best[..., None], axis=2).swapaxes(1, 2)
    np.testing.assert_allclose(out, expected, atol=1e-3)


def test_tie_of_large_scores_gives_the_mean():
    q = jnp.full((1, 1, 1, 3), 1e5)
    out = dot_product_attention(q, jnp.repeat(q, 2, axis=1), jnp.ones((1, 2, 1, 3)))
    np.testing.assert_allclose(out, 1, rtol=1e-6)
