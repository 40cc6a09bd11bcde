"""Packed sequences: prefix sums of where each starts, and what they say of every row.

`cu_seqlens` is int32 [B, M + 1] throughout: sequence m of a batch row takes the places
cu_seqlens[m] … cu_seqlens[m + 1] - 1. Sequences may be empty; places before the first and after the
last belong to none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def ascending(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """The same, made to ascend within 0 … length, so that wrong ones reach no other memory."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, length), axis=1)


def sequence_of(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """Which sequence each place belongs to, counted from 1, and 0 where none: int32 [B, length]."""
    starts = ascending(cu_seqlens, length)
    places = jnp.arange(length, dtype=jnp.int32)
    found = jax.vmap(lambda row: jnp.searchsorted(row, places, side="right"))(starts)
    return jnp.where(found < starts.shape[1], found, 0).astype(jnp.int32)
