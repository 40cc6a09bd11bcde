"""FlashAttention-4's kernels, called through fa4-jax's backends.

fa4-jax's public function brings its own derivative. Here attn_dispatch differentiates, so it calls
the backends below that function.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.flash.call import FlashCall
from attn_dispatch.semantics.wider_arrays import round_up

BACKEND = "cute"
"""The GPU kernels; "reference" would be the same in plain JAX."""

_LARGEST_TILE = 128
"""The most query rows of a backward kernel's tile."""

_COLUMNS = 32
"""Head dims of accumulators are multiples of it."""


def forward(
    call: FlashCall, qkv: Sequence[jax.Array], offsets: tuple[jax.Array, ...], scale: float
) -> tuple[jax.Array, jax.Array]:
    """out and lse: [B, T, N, H] and [B, N, T], or packed [rows, N, H] and [N, rows]."""
    backend, config = _backend(call, scale)
    return backend.fwd_lse(config, *qkv, (), _sequences(offsets))


def backward(
    call: FlashCall, operands: Sequence[jax.Array], offsets: tuple[jax.Array, ...], scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, from (out_grad, query, key, value, out, lse)."""
    backend, config = _backend(call, scale)
    out_grad, query, key, value, out, lse = operands
    arrays = (query, key, value, out, lse, out_grad)
    return backend.vjp(config, *arrays, None, (), _sequences(offsets))


def workspace_bytes(call: FlashCall, sequences: int) -> int:
    """Bytes that the backward pass accumulates in float32 (fa4_jax.kernels.CuteBackend.vjp).

    These are the query's gradient and two numbers per row, with each sequence's rows rounded up to
    a tile. Value's gradient is accumulated only with grouped heads, which rules.py excludes.
    """
    if not call.backward:
        return 0
    rows = call.rows_q if call.is_packed else call.batch * call.rows_q
    numbers = round_up(call.head_dim, _COLUMNS) + 2
    return 4 * (rows + _LARGEST_TILE * (sequences + 1)) * call.num_heads * numbers


def _backend(call: FlashCall, scale: float) -> tuple[Any, Any]:
    """The backend and its configuration of the call, in which scale and window are constants."""
    attention: Any = import_module("fa4_jax.attention")

    left, right = (None if x < 0 else x for x in (call.window_left, call.window_right))
    has_window = not call.is_causal and (left, right) != (None, None)
    config = attention.AttnConfig(
        causal=call.is_causal,
        local=has_window,
        window=(left, right) if has_window else (None, None),
        scale=scale,
        mask=None,
        backend=BACKEND,
        varlen=call.is_packed,
    )
    return attention.get_backend(BACKEND), config


def _sequences(offsets: tuple[jax.Array, ...]) -> tuple[jax.Array, ...] | None:
    """Offsets of queries and of keys, and the lengths: every sequence uses all of its rows."""
    return (*offsets, *map(jnp.diff, offsets)) if offsets else None
