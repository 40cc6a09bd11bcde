"""The few keys that are left beside a kernel's, taken into its results by XLA.

Keys are taken one after the other, element by element, so that XLA makes two or three small
kernels of it: matrix products, a softmax and a merge are a dozen, each of which takes as long as
its start. What 4 queries of 32 heads on 8 take longer than one are 7 µs so, and were 16 (16 rows of
8,192 keys, 128 dims, H200, 9.19).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Arrays
from attn_dispatch.semantics.merge import shares
from attn_dispatch.semantics.pages import keys_at

MAX_LAST_PAIRS = 80
"""Queries times keys: with more, matrix products are faster. 4 queries and 10 keys of 32 heads on
one took 52 µs, and 54 with 66 keys and products; 8 queries and 14 keys 71, and 66 with 70."""

_FEW = 4
"""Keys that are found in their pages again for each query and head; more are copied first."""


def with_last_keys(
    spec: AttentionSpec,
    operands: Arrays,
    results: tuple[jax.Array, jax.Array],
    places: jax.Array,
    may_attend: jax.Array,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results over a kernel's keys and these: out [B, T, N, V] and lse [B, T, N], in float32.

    Args:
      spec: a call with no other option of scores than a scale, a soft cap and a bias.
      operands: its arrays. What stands in key and value where nobody attends reaches nothing.
      results: out and lse over the kernel's keys; a row of it without keys has an lse of -inf.
      places: int32 [B, L], where the keys stand in their row.
      may_attend: bool [B, T, L].
      bias: [B, 1|N, 1|T, L].
    """
    out, lse = results
    wide = jnp.dtype(spec.lse_dtype)
    key, value = keys_at(spec, operands, places)
    batch, number, kv_heads = *places.shape, spec.num_kv_heads
    if number > _FEW:
        key, value = jax.lax.optimization_barrier((key, value))
    key, value = (x.astype(wide) for x in (key, value))
    grouped = (batch, spec.seq_len_q, kv_heads, spec.num_heads // kv_heads)
    query = operands["query"].astype(wide).reshape(*grouped, 1, spec.head_dim)
    # [B, T, K, G, L] of [B, T, K, G, 1, H] and [B, 1, K, 1, L, H].
    score = (query * jnp.swapaxes(key, 1, 2)[:, None, :, None]).sum(-1) * spec.meaning.scale
    if (cap := spec.meaning.logits_soft_cap) is not None:
        score = cap * jnp.tanh(score / cap)
    if bias is not None:
        bias = jnp.broadcast_to(bias, (batch, spec.num_heads, spec.seq_len_q, number))
        score += jnp.moveaxis(bias.astype(wide), 1, 2).reshape(score.shape)
    score = jnp.where(may_attend[:, :, None, None], score, -jnp.inf)
    (of_kernel, *of_keys), lse = shares(
        [lse.reshape(grouped).astype(wide), *(score[..., j] for j in range(number))]
    )

    def part(share: jax.Array, x: jax.Array) -> jax.Array:
        """Where nobody attends, x may be NaN."""
        return jnp.where(share[..., None] == 0, 0, share[..., None] * x)

    found = part(of_kernel, out.reshape(*grouped, -1).astype(wide))
    for j, share in enumerate(of_keys):
        found += part(share, value[:, j][:, None, :, None])
    return found.reshape(out.shape), lse.reshape(*out.shape[:3])
