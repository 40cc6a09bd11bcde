"""Prints the module of a small model lowered for cuda, without locations; run as a script."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import attn_dispatch

Q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)


@jax.jit
def loss_and_gradients(q, k, v):
    def loss(q, k, v):
        for _ in range(2):
            q = attn_dispatch.dot_product_attention(q, k, v, is_causal=True)
            q = attn_dispatch.dot_product_attention(q, k, v)
        return q.astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


if __name__ == "__main__":
    with attn_dispatch.target("sm90"):
        lowered = loss_and_gradients.trace(Q, KV, KV).lower(lowering_platforms=("cuda",))
    print(lowered.as_text(debug_info=False))
