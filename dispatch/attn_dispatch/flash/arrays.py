"""Conversion between a call's arrays and the kernels': padding, and packing into one axis of rows.

Kernels multiply whole tiles, in which 0 · NaN is NaN. So padding becomes 0, and a packed array of
several batch rows has a tile of zeros between them, so that NaN in one reaches no other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.devices.clear_rows import cleared_together
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.semantics.row_flags import cleared_by_xla
from attn_dispatch.semantics.wider_arrays import pad_last

Rows = tuple[jax.Array, jax.Array | None]
"""An array and its rows' flags [1|B, L]; None if none are to be cleared."""


def to_kernel(call: FlashCall, *arrays: Rows, head_dim: int) -> list[jax.Array]:
    """Arrays [B, L, heads, D] with the kernels' head dim, and 0 in rows that are not real.

    With a single batch row, they are cleared in place if nothing else reads them, as in training.
    """
    if call.is_packed and not call.gap:
        return cleared_together(*(_flat(pad_last(x, head_dim), flags) for x, flags in arrays))
    return [_in_own_tiles(call, pad_last(x, head_dim), flags) for x, flags in arrays]


def from_kernel(call: FlashCall, *arrays: Rows) -> list[jax.Array]:
    """A kernel's results as [B, L, heads, D], cleared according to their rows' flags."""
    if call.is_packed and not call.gap:
        found = cleared_together(*((x, _one_axis(flags)) for x, flags in arrays))
        return [x.reshape(1, *x.shape) for x in found]
    return [_from_own_tiles(call, x, flags) for x, flags in arrays]


def _flat(x: jax.Array, flags: jax.Array | None) -> Rows:
    return x.reshape(-1, *x.shape[2:]), _one_axis(flags)


def _one_axis(flags: jax.Array | None) -> jax.Array | None:
    return None if flags is None else flags.reshape(-1)


def _in_own_tiles(call: FlashCall, x: jax.Array, flags: jax.Array | None) -> jax.Array:
    """x cleared; packed, with the gap after each batch row."""
    x = x if flags is None else cleared_by_xla(x, flags)
    if not call.is_packed:
        return x
    return jnp.pad(x, ((0, 0), (0, call.gap), (0, 0), (0, 0))).reshape(-1, *x.shape[2:])


def _from_own_tiles(call: FlashCall, x: jax.Array, flags: jax.Array | None) -> jax.Array:
    if call.is_packed:
        x = x.reshape(call.batch, -1, *x.shape[1:])
        x = x[:, : x.shape[1] - call.gap]
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
