"""A program with a call of FlashAttention, and its gradients, for tests/gpu."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import attn_dispatch


def attend(q, k, v, implementation="flash", **options):
    options = {"is_causal": True} | options
    return attn_dispatch.dot_product_attention(q, k, v, implementation=implementation, **options)


def gradients(call):
    def step(q, k, v, out_grad):
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(out_grad)

    return jax.jit(step)


def assert_close(found, expected, tolerance=0.03):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() <= tolerance * max(1.0, np.abs(y).max())


def packed(q, k, v, implementation="flash"):
    ids = jnp.repeat(
        jnp.array([1, 2, 4, 0]), jnp.array([200, 130, 150, 32]), total_repeat_length=512
    )
    ids = jnp.broadcast_to(ids, q.shape[:2])
    options = {"query_segment_ids": ids, "max_segments": 4}
    return attend(q, k, v, implementation, **options)
