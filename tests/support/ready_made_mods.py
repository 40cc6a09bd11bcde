"""Calls with ready-made mods, compared with attention by definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import dot_product_attention

B, T, S, N, K, H = 2, 9, 13, 4, 2, 8
RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


Q, KEY, V, OUT_GRAD = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H), normal(B, S, N, H)
SLOPES, TABLE = jnp.asarray(RNG.random(N), jnp.float32), normal(8, N)
t, s = np.arange(T)[:, None], np.arange(S)


def by_definition(q: Any, k: Any, v: Any, score_of: Any = None, mask: Any = True) -> jax.Array:
    """Attention with all scores at once: score_of(scores [B, N, T, S]), mask [(B, 1,) T, S]."""
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    scores = scores if score_of is None else score_of(scores)
    mask = jnp.broadcast_to(mask, (batch, N, rows, keys))
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    p = jnp.where(mask, p, 0)  # 0 in rows without keys, too
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def assert_same(ours: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> None:
    """Results and gradients of all arrays are the same."""

    def both(call: Callable[..., Any]) -> Any:
        def loss(*arrays: Any) -> tuple[jax.Array, jax.Array]:
            out = call(*arrays)
            return (out * OUT_GRAD[:, : out.shape[1]]).sum(), out

        return jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)

    got, expected = jax.jit(lambda: both(ours))(), jax.jit(lambda: both(plain))()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def assert_masks(mask_mod: Any, mask: Any, q: Any = Q, k: Any = KEY, v: Any = V) -> None:
    mask = np.asarray(mask)
    assert 0 < mask.mean() < 1
    assert_same(
        lambda *x: dot_product_attention(*x, mask_mod=mask_mod),
        lambda *x: by_definition(*x, mask=mask),
        q, k, v,
    )  # fmt: skip


def pairs(mask_mod: Any, rows: int = T, keys: int = S) -> np.ndarray:
    """The mask's results [rows, keys], computed for one pair at a time."""
    of_row = jax.vmap(mask_mod, (None, None, None, 0))
    of_all = jax.jit(jax.vmap(of_row, (None, None, 0, None)))
    zero = jnp.int32(0)
    return np.asarray(of_all(zero, zero, *(jnp.arange(x, dtype=jnp.int32) for x in (rows, keys))))


PARENTS = np.array([-1, 0, 0, 1, 2, -1, 5, 1, 4])
"""The parents of T tokens, which form two trees after the cache."""


def first_two(b: Any, n: Any, t: Any, s: Any) -> Any:
    return s < 2
