"""The custom calls of FlashAttention-3's kernels: operands, results and attributes.

As dew-flash-attn's library takes them (its dew_flash_attn/__init__.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.flash import library
from attn_dispatch.flash.call import FlashCall, offsets_count

_TILE = 128
"""The most query rows that a backward kernel takes at once."""


def forward(
    call: FlashCall, qkv: Sequence[jax.Array], offsets: tuple[jax.Array, ...], scale: float
) -> tuple[jax.Array, jax.Array]:
    """out and lse, [B, T, N, H] and [B, N, T], or packed [rows, N, H] and [N, rows]."""
    rows = (call.rows_q,) if call.is_packed else (call.batch, call.rows_q)
    lse = (call.num_heads, call.rows_q)
    results = [
        jax.ShapeDtypeStruct((*rows, call.num_heads, call.head_dim_v), call.dtype),
        jax.ShapeDtypeStruct(lse if call.is_packed else (call.batch, *lse), jnp.float32),
        # For keys that are split, which this build does not.
        jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),
    ]
    run = jax.ffi.ffi_call(_target(library.FORWARD_TARGET, call), results)
    out, lse, *_ = run(*qkv, *offsets, **_attributes(call, scale))
    return out, lse


def backward(
    call: FlashCall,
    operands: Sequence[jax.Array],
    offsets: tuple[jax.Array, ...],
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, of (out_grad, query, key, value, out, lse)."""
    _, query, key, value, *_ = operands
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    results = [*arrays, *[_scratch(call, offsets)] * 2]
    run = jax.ffi.ffi_call(_target(library.BACKWARD_TARGET, call), results)
    dq, dk, dv, *_ = run(*operands, *offsets, **_attributes(call, scale))
    return dq, dk, dv


def workspace_bytes(call: FlashCall) -> int:
    """The scratch memory among the results, and copies of arrays whose rows must lie apart; what
    else a kernel wants it takes from XLA's pool."""
    copies = 0
    if call.gap:
        of_queries, of_keys = (4, 4) if call.backward else (2, 2)
        rows = (
            of_queries * call.rows_q * call.num_heads + of_keys * call.rows_kv * call.num_kv_heads
        )
        copies = 2 * rows * call.head_dim
    if not call.backward:
        return copies
    sequences = offsets_count(call) - 1 if call.is_packed else call.batch
    return copies + 2 * 4 * _scratch_rows(call, sequences)


def _scratch(call: FlashCall, offsets: tuple[jax.Array, ...]) -> jax.ShapeDtypeStruct:
    sequences = offsets[0].shape[0] - 1 if offsets else call.batch
    return jax.ShapeDtypeStruct((_scratch_rows(call, sequences),), jnp.float32)


def _scratch_rows(call: FlashCall, sequences: int) -> int:
    """A number for each query row and head, the rows of a sequence rounded up to a tile, which has
    64, 80, 96 or 128 rows, and one more tile for all of them together."""
    rows = call.rows_q if call.is_packed else call.batch * call.rows_q
    return call.num_heads * (rows + _TILE * (sequences + 1))


def _target(name: str, call: FlashCall) -> str:
    return name + library.PACKED if call.is_packed else name


def _attributes(call: FlashCall, scale: float) -> dict[str, bool | np.generic]:
    attributes = {
        "softmax_scale": np.float64(scale),
        "is_causal": call.is_causal,
        "window_size_left": np.int64(call.window_left),
        "window_size_right": np.int64(call.window_right),
    }
    if call.is_packed:
        attributes |= {
            "max_seqlen": np.int64(call.longest_q),
            "max_seqlen_k": np.int64(call.longest_kv),
        }
    return attributes
