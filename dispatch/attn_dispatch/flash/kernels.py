"""The custom calls of FlashAttention's kernels: operands, results and attributes.

They are those of dew-flash-attn's libraries (its dew_flash_attn/__init__.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.flash.buffers import backward_results, forward_results, scratch_bytes
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.flash.generations import FA2, FfiTarget


def forward(
    call: FlashCall, qkv: Sequence[jax.Array], offsets: tuple[jax.Array, ...], scale: float
) -> tuple[jax.Array, jax.Array]:
    """out and lse: [B, T, N, H] and [B, N, T], or packed [rows, N, H] and [N, rows]."""
    out, lse, *_ = _run(call, forward_results(call), (*qkv, *offsets), scale)
    if _has_lse_by_sequence(call):
        lse = _lse_by_row(lse, offsets[0], call.rows_q)
    return out, lse


def backward(
    call: FlashCall,
    operands: Sequence[jax.Array],
    offsets: tuple[jax.Array, ...],
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, from (out_grad, query, key, value, out, lse)."""
    *arrays, lse = operands
    if _has_lse_by_sequence(call):
        lse = _lse_by_sequence(lse, offsets[0], call.longest_q)
    dq, dk, dv, *_ = _run(call, backward_results(call), (*arrays, lse, *offsets), scale)
    return dq, _summed_to_kv_heads(call, dk), _summed_to_kv_heads(call, dv)


def workspace_bytes(call: FlashCall) -> int:
    """The scratch memory among the results. Kernels take more from XLA's pool if they need it."""
    return scratch_bytes(call)


def _run(
    call: FlashCall,
    results: list[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    scale: float,
) -> Sequence[jax.Array]:
    target = call.generation.target(is_backward=call.backward, is_packed=call.is_packed)
    run = jax.ffi.ffi_call(target.name, results)
    return run(*operands, **_attributes(call, target, scale))


def _attributes(call: FlashCall, target: FfiTarget, scale: float) -> dict[str, bool | np.generic]:
    attributes: dict[str, bool | np.generic] = {
        "softmax_scale": target.scale(scale),
        "is_causal": call.is_causal,
        "window_size_left": np.int64(call.window_left),
        "window_size_right": np.int64(call.window_right),
    }
    longest = (call.longest_q, call.longest_kv)
    attributes |= {x: target.count(y) for x, y in zip(target.longest, longest, strict=False)}
    return attributes | dict.fromkeys(target.off, False)


def _has_lse_by_sequence(call: FlashCall) -> bool:
    """Whether lse is [sequences, N, longest], starting with each sequence's first query."""
    return call.is_packed and call.generation is FA2


def _lse_by_row(lse: jax.Array, offsets: jax.Array, rows: int) -> jax.Array:
    """lse [N, rows], from [sequences, N, longest]."""
    row = jnp.arange(rows, dtype=jnp.int32)
    sequence = jnp.searchsorted(offsets, row, side="right").astype(jnp.int32) - 1
    return lse[sequence, :, row - offsets[sequence]].T


def _lse_by_sequence(lse: jax.Array, offsets: jax.Array, longest: int) -> jax.Array:
    """lse [sequences, N, longest], from [N, rows]. Values past a sequence's end are not read."""
    row = offsets[:-1, None] + jnp.arange(longest, dtype=jnp.int32)
    return jnp.swapaxes(lse[:, jnp.minimum(row, lse.shape[1] - 1)], 0, 1)


def _summed_to_kv_heads(call: FlashCall, x: jax.Array) -> jax.Array:
    """Gradients [..., K, H]; if the kernel has one per query head, summed."""
    if x.shape[-2] == call.num_kv_heads:
        return x
    grouped = x.reshape(*x.shape[:-2], call.num_kv_heads, -1, x.shape[-1])
    return grouped.sum(-2)
