"""`score_mod`, `mask_mod` and `attn_dispatch.mods`"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, mods, paged_attention

Q = jnp.ones((2, 8, 4, 8))
KEY = jax.random.key(0)
SLOPES = jnp.ones(4)
TABLE = jnp.ones((8, 4))
IDS = jnp.ones((3, 8), int)
ARRAY = np.arange(4.0)
MASK = mods.chunked_window(4)


def scored(mod: Any, args: Any = ()) -> jax.Array:
    return dot_product_attention(Q, Q, Q, score_mod=mod, score_mod_args=args)


def masked(mod: Any, **options: Any) -> jax.Array:
    """The call, which is refused in jit as well."""
    with pytest.raises(ValueError):
        jax.jit(lambda q: dot_product_attention(q, q, q, mask_mod=mod, **options))(Q)
    return dot_product_attention(Q, Q, Q, mask_mod=mod, **options)


def paged(mod: Any) -> jax.Array:
    pages, table = jnp.ones((2, 4, 4, 8)), jnp.arange(2)[:, None]
    return paged_attention(Q[:, :1], pages, pages, table, jnp.full(2, 4), score_mod=mod)


def noisy(score: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
    return score + jax.random.normal(jax.random.fold_in(KEY, t))


ROWS = """
# functions as score_mod
scored(3)
scored(SLOPES)
scored(lambda score, b: score)
scored(lambda score, b, n, t, s: score, (SLOPES,))
scored(lambda score, b, n, t, s: score, 3)
scored(lambda score, b, n, t, s: t)
scored(lambda score, b, n, t, s: (score,))
scored(lambda score, b, n, t, s: "yes")
scored(lambda score, b, n, t, s: SLOPES)
scored(lambda score, b, n, t, s: (score, b))
scored(lambda score, b, n, t, s: score if t > s else 0.0)
scored(lambda score, b, n, t, s: score + (t > s and 1))
scored(lambda score, b, n, t, s: score + ARRAY[n])
scored(lambda score, b, n, t, s, x: score, (KEY,))
scored(lambda score, b, n, t, s, x: score, ("x",))
scored(noisy)

# functions as mask_mod
masked(lambda b, n, t, s: t - s)
masked(jnp.ones((8, 8), bool))
masked(mods.soft_cap(3.0))
masked(None, mask_mod_args=(SLOPES,))

# ready-made mods
mods.soft_cap(0)
mods.soft_cap(np.inf)
mods.soft_cap("3")
mods.soft_cap(SLOPES)
mods.alibi(SLOPES[None])
mods.alibi([1, 2])
mods.relative_position(SLOPES)
mods.relative_position(TABLE[:7])
mods.relative_position(TABLE[:2])
mods.relative_position(TABLE, bidirectional=32)
mods.prefix_lm(2.5)
mods.prefix_lm("3")
mods.prefix_lm(-1)
mods.prefix_lm(SLOPES)
mods.document_mask([1, 1])
mods.document_mask([[1]], [1])
mods.document_mask([[1], [2]], [[1]])
mods.dilated_window(-1, 2)
mods.dilated_window(3, 0)
mods.chunked_window(2.5)
mods.chunked_window(True)
mods.chunked_window(2**31)
mods.neighborhood_2d(0, 3, 1)
mods.neighborhood_2d(5, 4, 2)
mods.shared_prefix(3, [[1]], 9)
mods.shared_prefix([3], [1], 9)
mods.shared_prefix([3], [[1], [2]], 9)
mods.shared_prefix([3], [[1], [2, 3]], 9)
mods.shared_prefix([3], [[1]], 2.5)
mods.tree_mask([[[0]]])
mods.tree_mask([-1, 1])
mods.tree_mask([-1, 0, -2])
mods.tree_mask([-1], -3)
mods.tree_mask([-1], 2.5)
mods.all_of()
mods.any_of(MASK, True)
mods.not_(3)
mods.not_(mods.soft_cap(3.0))
mods.with_query_offset(MASK, -1)
mods.with_query_offset(MASK, SLOPES)
jax.jit(lambda x: mods.soft_cap(x)(0.0, 0, 0, 0, 0))(3)
jax.jit(lambda x: mods.chunked_window(x)(0, 0, 0, 0))(3)
mods.prefixlm
mods.slidingwindow
mods.alibis

# ready-made mods in calls of other sizes
masked(mods.prefix_lm(jnp.arange(3)))
masked(mods.prefix_lm(np.array([3])))
masked(mods.shared_prefix([2] * 3, [[1]] * 3, 8))
masked(mods.shared_prefix([2] * 2, [[1]] * 2, 5))
masked(mods.shared_prefix([2] * 2, [[1]] * 2, 20))
masked(mods.document_mask(IDS))
masked(mods.document_mask(IDS[:2, :5]))
masked(mods.document_mask(IDS[:2], IDS[:2, :5]))
masked(mods.neighborhood_2d(3, 3, 1))
masked(mods.tree_mask([-1] * 7))
masked(mods.tree_mask(-IDS))
masked(mods.tree_mask([-1] * 8, IDS[:, 0]))
masked(mods.all_of(MASK, mods.prefix_lm([3])))
masked(mods.any_of(mods.not_(mods.prefix_lm([3]))))
masked(mods.with_query_offset(MASK, IDS[:, 0]))
masked(mods.with_query_offset(mods.document_mask(IDS[:2, :5]), 1))
explain(Q, Q, Q, score_mod=mods.alibi(jnp.ones(3)))
explain(Q, Q, Q, score_mod=mods.with_query_offset(mods.relative_position(TABLE[:, :2]), 3))
paged(mods.with_query_offset(mods.soft_cap(3.0), jnp.arange(3)))
"""
