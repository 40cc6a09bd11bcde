"""Print the modules of small models lowered for CUDA and for the CPU; run as a script."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import attn_dispatch
from attn_dispatch import mods

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


@jax.jit
def with_options(q, k, v, ids, bias, sinks, slopes):
    """Every option that has a gradient; some of them are rewritten for cuDNN."""

    def loss(q, k, v, bias, sinks, slopes):
        options: dict[str, Any] = {"bias": bias, "sinks": sinks, "return_max_logits": True}
        ids_of = {"query_segment_ids": ids[:, :128], "key_value_segment_ids": ids}
        out, row_max = attn_dispatch.dot_product_attention(q, k, v, **options, **ids_of)
        options = {"score_mod": mods.alibi(slopes), "dropout_rate": 0.0, "return_lse": True}
        wide, lse = attn_dispatch.dot_product_attention(q, k, jnp.tile(v, 5), **options)
        parts = (out, row_max, wide, lse)
        return sum(x.astype(jnp.float32).sum() for x in parts)

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4, 5))(q, k, v, bias, sinks, slopes)


def main() -> None:
    shapes = (((2, 256), jnp.int32), ((1, 8, 128, 1), jnp.float32), ((8,), jnp.float32),
              ((8,), jnp.float32))  # fmt: skip
    others = [jax.ShapeDtypeStruct(*x) for x in shapes]
    for platform in ("cuda", "cpu"):
        with attn_dispatch.target("sm90"):
            for traced in (
                loss_and_gradients.trace(Q, KV, KV),
                with_options.trace(Q, KV, KV, *others),
            ):
                print(traced.lower(lowering_platforms=(platform,)).as_text(debug_info=False))


if __name__ == "__main__":
    main()
