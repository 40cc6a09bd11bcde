"""tree_mask against its definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods
from tests.support.ready_made_mods import (
    KEY,
    PARENTS,
    RNG,
    Q,
    S,
    T,
    V,
    assert_masks,
    by_definition,
)


def tree_by_definition(parents: Any, cache: int) -> np.ndarray:
    """The mask bool [T, S], by following each token's parents."""
    mask = np.zeros((len(parents), S), bool)
    mask[:, :cache] = True
    for token in range(len(parents)):
        ancestor = token
        while ancestor >= 0:
            mask[token, cache + ancestor] = True
            ancestor = int(parents[ancestor])
    return mask


@pytest.mark.parametrize("cache", [0, 2, 4])
def test_tree_mask_agrees_with_its_definition(cache: int):
    """With a cache of 2, no token attends to the two keys after the tree."""
    assert_masks(mods.tree_mask(PARENTS, cache), tree_by_definition(PARENTS, cache))


def test_tree_mask_with_traced_trees_and_caches():
    """Each batch row has another tree and cache length."""
    parents = np.stack([PARENTS, np.arange(T) - 1])
    caches = np.array([1, 3])
    mask = np.stack([tree_by_definition(*x) for x in zip(parents, caches, strict=True)])

    @jax.jit
    def attend(parents: Any, caches: Any) -> jax.Array:
        return dot_product_attention(Q, KEY, V, mask_mod=mods.tree_mask(parents, caches))

    out = attend(parents, caches)
    np.testing.assert_allclose(out, by_definition(Q, KEY, V, mask=mask[:, None]), atol=2e-5)


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_drawn_trees_agree_with_the_definition(size: int):
    parents = np.array([[RNG.integers(-1, i) for i in range(size)] for _ in range(20)])
    # With unit vectors as values, the output holds the probabilities.
    q, k = jnp.zeros((20, size, 1, 1)), jnp.zeros((20, S, 1, 1))
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (20, S, 1, S))
    seen = dot_product_attention(q, k, v, mask_mod=mods.tree_mask(parents))[:, :, 0] > 0
    np.testing.assert_array_equal(seen, [tree_by_definition(x, 0) for x in parents])
