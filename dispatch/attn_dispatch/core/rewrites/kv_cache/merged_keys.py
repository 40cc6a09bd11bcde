"""The few keys of a row that a kernel left out, merged into its results by XLA.

The computation takes one key after the other, with elementwise operations alone, which XLA fuses
into two or three kernels. Matrix products, a softmax and a merge would be a dozen kernels, each of
which takes hardly more than its launch. 4 queries of 32 heads on 8 take 7 µs longer than one query
this way, and 16 µs longer with matrix products (16 rows of 8,192 keys, 128 dims, H200, cuDNN 9.19).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import NamedArrays
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.merge import shares
from attn_dispatch.semantics.pages import keys_at

MOST_MERGED_PAIRS = 80
"""The most queries times keys. With more, matrix products are faster. 4 queries of 32 heads on one
took 52 µs with 10 keys, and 54 µs with matrix products and 66 keys; 8 queries took 71 µs with 14
keys, and 66 µs with matrix products and 70 keys."""

_FEW = 4
"""The most keys that are read from their pages again for each query and head; more are copied."""


def with_keys_merged(
    spec: AttentionSpec,
    operands: NamedArrays,
    results: tuple[jax.Array, jax.Array],
    places: jax.Array,
    may_attend: jax.Array,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The results over the kernel's keys and these keys together, in the dtype of lse.

    Args:
      spec: a call whose scores have no options except a scale, a soft cap and a bias.
      operands: the call's arrays. Keys and values that no query attends to may hold anything.
      results: out [B, T, N, V] and lse [B, T, N] over the kernel's keys. lse is -inf in rows to
        which the kernel gave no keys.
      places: int32 [B, L], the positions of the keys in their batch row.
      may_attend: bool [B, T, L], True where the query attends to the key.
      bias: [B, 1|N, 1|T, L], the bias at these keys.

    Returns:
      out [B, T, N, V] and lse [B, T, N].
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
    # [B, T, K, G, L] from [B, T, K, G, 1, H] and [B, 1, K, 1, L, H].
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
        """share · x, and 0 where the share is 0, because x may be NaN there."""
        return jnp.where(share[..., None] == 0, 0, share[..., None] * x)

    found = part(of_kernel, out.reshape(*grouped, -1).astype(wide))
    for j, share in enumerate(of_keys):
        found += part(share, value[:, j][:, None, :, None])
    return found.reshape(out.shape), lse.reshape(*out.shape[:3])


def results_of(
    spec: AttentionSpec,
    operands: NamedArrays,
    out: jax.Array,
    lse: jax.Array,
    is_query: jax.Array,
) -> NamedArrays:
    """The call's results, with padding rows cleared and invalid rows NaN.

    Args:
      spec: the call.
      operands: its arrays.
      out: [B, T, N, V], the output over all keys.
      lse: [B, T, N], -inf in rows that attend to no key.
      is_query: bool [B, T], False behind the queries of a row.
    """
    lse = jnp.where(is_query[..., None], lse, -jnp.inf)
    out = jnp.where((lse == -jnp.inf)[..., None], 0, out).astype(spec.dtype)
    results = {"out": out, "lse": jnp.swapaxes(lse, 1, 2).astype(spec.lse_dtype)}
    return nan_where_invalid(spec, operands, results)
