"""The custom calls of FlashAttention's kernels: operands, results and attributes.

They are those of dew-flash-attn's libraries (its dew_flash_attn/__init__.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.flash.call import FlashCall, offsets_count
from attn_dispatch.flash.generations import FA2, FfiTarget
from attn_dispatch.semantics.wider_arrays import round_up


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


Shapes = list[jax.ShapeDtypeStruct]

_TILE = 128
"""The most query rows of a backward kernel's tile."""

_LEAST_FULL, _EFFICIENT = 0.8, 0.85
"""FlashAttention-2's thresholds. Keys are not split if blocks fill 0.8 of the device. Otherwise it
takes the fewest splits that keep 0.85 of what the best number of splits keeps busy."""


def forward_results(call: FlashCall) -> Shapes:
    """out, lse, and partial results of both if keys are split among blocks."""
    out = jax.ShapeDtypeStruct((*_rows(call), call.num_heads, call.head_dim), call.dtype)
    return [out, *_forward_scratch(call)]


def backward_results(call: FlashCall) -> Shapes:
    """dq, dk, dv and two scratch arrays; FlashAttention-2's dk and dv have all query heads."""
    heads = call.num_heads if call.generation is FA2 else call.num_kv_heads
    keys = (call.rows_kv,) if call.is_packed else (call.batch, call.rows_kv)
    shapes = (
        (*_rows(call), call.num_heads, call.head_dim),
        (*keys, heads, call.head_dim),
        (*keys, heads, call.head_dim),
    )
    return [*(jax.ShapeDtypeStruct(x, call.dtype) for x in shapes), *_backward_scratch(call)]


def workspace_bytes(call: FlashCall) -> int:
    """Bytes of the results beyond output and lse, or beyond the call's gradients. Kernels take more
    from XLA's pool if they need it."""
    if not call.backward:
        lse = call.num_heads * call.rows_q * (1 if call.is_packed else call.batch)
        return sum(map(_bytes, _forward_scratch(call))) - 4 * lse
    further = call.num_heads - call.num_kv_heads if call.generation is FA2 else 0
    rows = call.rows_kv * (1 if call.is_packed else call.batch)
    gradients = 4 * rows * further * call.head_dim
    return gradients + sum(map(_bytes, _backward_scratch(call)))


def splits(call: FlashCall) -> int:
    """The number of blocks among which FlashAttention-2 splits the keys, in calls on whole rows.

    It is the fewest that keep nearly as much of the device busy as the best number would. The
    buffers must agree with the library's rule (num_splits_heuristic).
    """
    columns = 256 if call.head_dim <= 64 else 128 if call.head_dim <= 128 else 64
    tiles = max(1, -(-call.rows_kv // columns))
    blocks = call.batch * call.num_heads * max(1, -(-call.rows_q // 64))
    slots = 2 * call.multiprocessors
    if blocks >= _LEAST_FULL * slots:
        return 1
    shares: dict[int, float] = {}
    for count in range(1, min(128, slots, tiles) + 1):
        if count == 1 or -(-tiles // count) != -(-tiles // (count - 1)):
            waves = blocks * count / slots
            shares[count] = waves / math.ceil(waves)
    best = max(shares.values(), default=1.0)
    return min((x for x, share in shares.items() if share >= _EFFICIENT * best), default=1)


def _rows(call: FlashCall) -> tuple[int, ...]:
    return (call.rows_q,) if call.is_packed else (call.batch, call.rows_q)


def _forward_scratch(call: FlashCall) -> Shapes:
    """lse, in the kernel's layout, and partial results."""
    if call.generation is not FA2:
        lse = (call.num_heads, call.rows_q)
        lse = lse if call.is_packed else (call.batch, *lse)
        # This build does not split keys.
        return _floats(lse, (1, 1, 1, 1), (1, 1, 1))
    if call.is_packed:
        lse = (offsets_count(call) - 1, call.num_heads, call.longest_q)
        return _floats(lse, (1, 1, 1, 1, 1), (1, 1, 1, 1))
    lse, count = (call.batch, call.num_heads, call.rows_q), splits(call)
    columns = round_up(call.head_dim, 32)
    partial = (count, call.batch, call.rows_q, call.num_heads, columns)
    return _floats(lse, partial, (count, *lse))


def _backward_scratch(call: FlashCall) -> Shapes:
    sequences = offsets_count(call) - 1 if call.is_packed else call.batch
    if call.generation is not FA2:
        # A number for each query row and head. The rows of each sequence are rounded up to a tile
        # of 64, 80, 96 or 128 rows, and one more tile follows them all.
        rows = call.rows_q if call.is_packed else call.batch * call.rows_q
        numbers = call.num_heads * (rows + _TILE * (sequences + 1))
        return _floats((numbers,), (numbers,))
    columns = round_up(call.head_dim, 32)
    rounded = round_up(call.longest_q if call.is_packed else call.rows_q, _TILE)
    delta = (sequences, call.num_heads, rounded)
    if call.is_packed:
        return _floats(delta, (call.rows_q + _TILE * sequences, call.num_heads, columns))
    return _floats(delta, (call.batch, rounded, call.num_heads, columns))


def _floats(*shapes: tuple[int, ...]) -> Shapes:
    return [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
