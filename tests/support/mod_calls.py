"""Calls with a score_mod that adds a table, and the same calls with a bias."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention

B, T, S, N, K, H = 2, 9, 11, 4, 2, 8
_rng = np.random.default_rng(0)
Q, KEY, V = (
    jnp.asarray(_rng.standard_normal(x), jnp.float32)
    for x in ((B, T, N, H), (B, S, K, H), (B, S, K, H))
)
OUT_GRAD = jnp.asarray(_rng.standard_normal(Q.shape), jnp.float32)
TABLE = jnp.asarray(_rng.standard_normal((N, 8)), jnp.float32)
TABLES = jnp.stack([TABLE, 2 * TABLE, -TABLE])
SLOPES = jnp.asarray(_rng.random(N), jnp.float32)


def added(score, b, n, t, s, table):
    return score + table[n, jnp.clip(t - s + 4, 0, 7)] * (1 + b)


def as_bias(table: jax.Array, t: Any = None, s: Any = None) -> jax.Array:
    """The bias that `added` adds, [B, N, T, S]."""
    b, n, all_t, all_s = jnp.ogrid[:B, :N, :T, :S]
    return added(0.0, b, n, all_t if t is None else t, all_s if s is None else s, table)


def given(q, table, **options):
    """The call with the table passed in score_mod_args."""
    return dot_product_attention(q, KEY, V, score_mod=added, score_mod_args=(table,), **options)


def captured(q, table, **options):
    """The call whose score_mod captures the table."""
    return dot_product_attention(q, KEY, V, score_mod=lambda *x: added(*x, table), **options)


def with_bias(q, table, **options):
    """The call with the bias that `added` adds."""
    return dot_product_attention(q, KEY, V, as_bias(table), **options)


given_or_captured = pytest.mark.parametrize("call", [given, captured])


def loss(call):
    return lambda *x: (call(*x) * OUT_GRAD).sum()


def with_gradients(call, *arrays):
    out, pull = jax.vjp(call, *arrays)
    return out, pull(jnp.cos(out))


def assert_same(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
