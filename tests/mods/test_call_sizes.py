"""Ready-made mods in calls that they do not fit: of other sizes, or causal themselves."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import (
    AttentionConventionWarning,
    dot_product_attention,
    mods,
    ragged_dot_product_attention,
)

B, T, N = 2, 8, 4
Q = jnp.ones((B, T, N, 8))
ROWS = jnp.ones((3, T), int)


def calls_of_fitting_mods() -> dict[str, Any]:
    ids, ends = jnp.array([[1] * 5 + [2] * 3] * B), jnp.array([0, 5, 8, 8])
    longer = mods.with_query_offset(mods.document_mask(ROWS[:2].repeat(2, 1)), 3)
    shared = mods.shared_prefix([3], [[5]], T)

    def each(q: jax.Array, length: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, mask_mod=mods.prefix_lm(length[None]))

    return {
        "sequences": lambda: ragged_dot_product_attention(
            Q[0], Q[0], Q[0], cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=T,
            max_seqlen_kv=T, mask_mod=mods.prefix_lm(jnp.arange(3)),
        ),
        "segments": lambda: dot_product_attention(
            Q, Q, Q, query_segment_ids=ids, mask_mod=mods.tree_mask([-1] * 5)
        ),
        "offset": lambda: dot_product_attention(Q, Q, Q, mask_mod=longer),
        "vmap": lambda: jax.vmap(each)(Q, jnp.array([3, 5])),
        "no batch dim": lambda: dot_product_attention(Q[0], Q[0], Q[0], mask_mod=shared),
        "two batch dims": lambda: dot_product_attention(
            *[Q.reshape(1, B, T, N, 8)] * 3, mask_mod=mods.prefix_lm([3, 5])
        ),
        "heads first": lambda: dot_product_attention(
            *[Q.swapaxes(1, 2)] * 3, qkv_layout="BNTH", score_mod=mods.alibi(jnp.ones(N))
        ),
        "own arrays": lambda: dot_product_attention(
            Q, Q, Q, mask_mod=lambda b, n, t, s, x: s < x[b], mask_mod_args=(jnp.arange(1, 4),)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls_of_fitting_mods())
def test_a_mod_that_fits_is_called(name: str):
    """By shapes alone: sequences count as rows, and a mapped call has the rows of one element."""
    jax.eval_shape(calls_of_fitting_mods()[name])


PREFIX = mods.prefix_lm(3)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"mask_mod": PREFIX, "is_causal": True}, True),
        ({"mask_mod": PREFIX, "local_window_size": (4, 0)}, True),
        ({"mask_mod": mods.all_of(lambda b, n, t, s: s > 0, PREFIX), "is_causal": True}, True),
        ({"mask_mod": mods.with_query_offset(PREFIX, 2), "is_causal": True}, True),
        ({"mask_mod": PREFIX}, False),
        ({"mask_mod": mods.not_(PREFIX), "is_causal": True}, False),
        ({"mask_mod": mods.shared_prefix([3, 2], [[5], [4]], T), "is_causal": True}, False),
        ({"mask_mod": mods.chunked_window(4), "is_causal": True}, False),
    ],
)
def test_causality_around_a_causal_mod_with_a_prefix_warns(options: Any, warns: bool):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jax.eval_shape(lambda: dot_product_attention(Q, Q, Q, **options))
    said = [str(x.message) for x in found if x.category is AttentionConventionWarning]
    assert len(said) == warns
    if warns:
        remedy = "Leave is_causal out" if "is_causal" in options else "Pass (…, None)"
        assert remedy in said[0] and said[0].endswith(": prefix_lm is causal itself")
