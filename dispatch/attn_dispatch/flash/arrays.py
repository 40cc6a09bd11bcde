"""Conversion between a call's arrays and the kernels': padding, and packing into one axis of rows.

Kernels multiply whole tiles, in which 0 · NaN is NaN. So padding becomes 0, and a packed array of
several batch rows has a tile of zeros between them, so that NaN in one reaches no other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.devices.clear_rows import cleared
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.semantics.row_flags import cleared_by_xla
from attn_dispatch.semantics.wider_arrays import pad_last


def to_kernel(call: FlashCall, x: jax.Array, real: jax.Array | None, head_dim: int) -> jax.Array:
    """x [B, L, heads, D] with the kernels' head dim, and 0 in padding rows; `real` is [1|B, L].

    With a single batch row, x is cleared in place if nothing else reads it, as often in training.
    """
    x = pad_last(x, head_dim)
    if call.is_packed and not call.gap:
        x = x.reshape(-1, *x.shape[2:])
        return x if real is None else cleared(x, real.reshape(-1))
    if real is not None:
        x = cleared_by_xla(x, real)
    if not call.is_packed:
        return x
    return jnp.pad(x, ((0, 0), (0, call.gap), (0, 0), (0, 0))).reshape(-1, *x.shape[2:])


def from_kernel(call: FlashCall, x: jax.Array, flags: jax.Array | None, head_dim: int) -> jax.Array:
    """A kernel's result as [B, L, heads, D], cleared according to its rows' flags [1|B, L]."""
    if call.is_packed and not call.gap:
        x = x if flags is None else cleared(x, flags.reshape(-1))
        return x.reshape(1, *x.shape)[..., :head_dim]
    if call.is_packed:
        x = x.reshape(call.batch, -1, *x.shape[1:])
        x = x[:, : x.shape[1] - call.gap]
    x = x[..., :head_dim]
    return x if flags is None else cleared_by_xla(x, flags)


def lse_to_kernel(call: FlashCall, lse: jax.Array) -> jax.Array:
    """lse [B, N, T] as the kernels take it; packed, that is [N, rows]."""
    if not call.is_packed:
        return lse
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, call.gap)))
    return jnp.swapaxes(lse, 0, 1).reshape(call.num_heads, -1)


def lse_from_kernel(call: FlashCall, lse: jax.Array) -> jax.Array:
    """A kernel's lse, packed [N, rows], as [B, N, T]."""
    if not call.is_packed:
        return lse
    lse = jnp.swapaxes(lse.reshape(call.num_heads, call.batch, -1), 0, 1)
    return lse[..., : lse.shape[2] - call.gap]
