"""Conversion between a call's arrays and those of AITER's custom calls: layouts, padding, sums.

In group mode AITER's arrays have no batch axis: [B, L, …] becomes [B · L, …], and lse [B, N, T]
becomes [N, B · T].
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.sequences import Sequences
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.kernel_seed import kernel_seed
from attn_dispatch.semantics.scaled_query import scaled_query
from attn_dispatch.semantics.wider_arrays import pad_last

KernelArrays = dict[str, jax.Array]


def inputs(
    spec: AttentionSpec,
    call: AiterCall,
    operands: Mapping[str, jax.Array],
    sequences: Sequences,
) -> KernelArrays:
    """The operands that both directions begin with, in rocm_backend/call_structs.cc's order."""
    arrays = {
        "q": to_rows(pad_last(scaled_query(spec, operands["query"]), call.head_dim), call),
        "k": to_rows(pad_last(operands["key"], call.head_dim), call),
        "v": to_rows(pad_last(operands["value"], call.head_dim_v), call),
    }
    if call.bias == "bias":
        arrays["bias"] = _whole_rows(spec, operands["bias"])
    if call.bias == "alibi":
        arrays["bias"] = slopes_of_rows(operands["alibi_slopes"], call.batch)
    if call.dropout_rate > 0:
        arrays["rng_state"] = rng_state(spec, operands)
    arrays |= dict(
        zip(("seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k"), sequences.operands, strict=False)
    )
    return arrays


def slopes_of_rows(slopes: jax.Array, batch: int) -> jax.Array:
    """Slopes [1|B, N] as float32 [1|batch, N], repeated for each sequence of a batch row."""
    slopes = slopes.astype(jnp.float32)
    return slopes if slopes.shape[0] == 1 else jnp.repeat(slopes, batch // slopes.shape[0], axis=0)


def _whole_rows(spec: AttentionSpec, bias: jax.Array) -> jax.Array:
    """The bias as [1|B, 1|N, T, S]: AITER broadcasts it over batch and heads only."""
    return jnp.broadcast_to(bias, (*bias.shape[:2], spec.seq_len_q, spec.seq_len_kv))


def rng_state(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """{seed, offset}, two u64 as u32 words."""
    return jnp.append(kernel_seed(spec, operands), jnp.zeros(2, jnp.uint32))


def to_rows(x: jax.Array, call: AiterCall) -> jax.Array:
    """x [B, L, ...] as AITER takes it: unchanged, or in group mode [B · L, ...]."""
    return x.reshape(-1, *x.shape[2:]) if call.is_group else x


def from_rows(x: jax.Array, batch: int) -> jax.Array:
    """x [B, L, heads, D] or [B · L, heads, D] as [B, L, heads, D]."""
    return x if x.ndim == 4 else x.reshape(batch, -1, *x.shape[1:])


def lse_to_rows(lse: jax.Array, call: AiterCall) -> jax.Array:
    """lse [B, N, T] as AITER takes it: unchanged, or in group mode [N, B · T]."""
    return jnp.swapaxes(lse, 0, 1).reshape(call.num_heads, -1) if call.is_group else lse


def lse_from_rows(lse: jax.Array, spec: AttentionSpec) -> jax.Array:
    if lse.ndim == 3:
        return lse
    return jnp.swapaxes(lse.reshape(spec.num_heads, spec.batch, spec.seq_len_q), 0, 1)


def where_real(real: jax.Array | None, x: jax.Array, value: float) -> jax.Array:
    return x if real is None else jnp.where(real[:, :, None, None], x, value)


def rounded_dq(dq_acc: jax.Array, dtype: str) -> jax.Array:
    """The gradient of query from its float32 sums, whose heads come before their rows."""
    return jnp.swapaxes(dq_acc, -3, -2).astype(dtype)


def sum_groups(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """Gradients [B, S, N, D], one per query head, summed to [B, S, K, D]."""
    if spec.num_heads == spec.num_kv_heads:
        return x
    by_group = x.reshape(*x.shape[:2], spec.num_kv_heads, -1, x.shape[3])
    return by_group.astype(jnp.float32).sum(axis=3).astype(x.dtype)


def sum_to_bias(spec: AttentionSpec, dbias: jax.Array) -> jax.Array:
    """The gradient [B, T, N, S] of every score, summed to the shape of the bias."""
    shape = spec.shape("bias")
    scores = jnp.swapaxes(dbias, 1, 2).astype(jnp.float32)
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return scores.sum(axis=axes, keepdims=True).astype(dbias.dtype)
