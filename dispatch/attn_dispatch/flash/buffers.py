"""The results of FlashAttention's custom calls, including scratch memory.

They are those that dew-flash-attn's Python asks for (its dew_flash_attn/__init__.py).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from attn_dispatch.flash.call import FlashCall, offsets_count
from attn_dispatch.flash.generations import FA2
from attn_dispatch.semantics.wider_arrays import round_up

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


def scratch_bytes(call: FlashCall) -> int:
    """Bytes of the results beyond output and lse, or beyond the call's gradients."""
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
