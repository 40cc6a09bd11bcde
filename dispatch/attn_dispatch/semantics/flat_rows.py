"""Batch rows one after the other, as kernels take packed sequences: arrays without a batch axis.

[B, L, …] becomes [B · L, …], and lse, [B, N, T] everywhere else, becomes [N, B · T].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec


def to_rows(x: jax.Array, is_flat: bool) -> jax.Array:
    """[B, L, ...], or if flat [B · L, ...]."""
    return x.reshape(-1, *x.shape[2:]) if is_flat else x


def from_rows(x: jax.Array, batch: int) -> jax.Array:
    """[B, L, heads, D] of what is that already, or [B · L, heads, D]."""
    return x if x.ndim == 4 else x.reshape(batch, -1, *x.shape[1:])


def lse_to_rows(lse: jax.Array, is_flat: bool) -> jax.Array:
    """[B, N, T], or if flat [N, B · T]."""
    return jnp.swapaxes(lse, 0, 1).reshape(lse.shape[1], -1) if is_flat else lse


def lse_from_rows(lse: jax.Array, spec: AttentionSpec) -> jax.Array:
    """[B, N, T] of what is that already, or [N, B · T]."""
    if lse.ndim == 3:
        return lse
    return jnp.swapaxes(lse.reshape(spec.num_heads, spec.batch, spec.seq_len_q), 0, 1)


def where_live(live: jax.Array | None, x: jax.Array, value: float) -> jax.Array:
    """x [B, L, heads, D], with a value in the rows that are not live; None: all are."""
    return x if live is None else jnp.where(live[:, :, None, None], x, value)
