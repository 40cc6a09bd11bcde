"""Flags of rows that kernels leave unspecified: padding rows become 0, and invalid rows NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

PADDING, REAL, INVALID = (np.uint8(x) for x in range(3))
"""The flags of cuda_backend/clear_rows.h."""


def flags_of(real: jax.Array, invalid: jax.Array | None) -> jax.Array:
    """The flags of the output's rows, uint8, of which `real` [1|B, T] or [1|B, T, N] are real, and
    `invalid` are those of `invalid_queries`."""
    return with_invalid(jnp.where(real, REAL, PADDING), invalid)


def with_invalid(flags: jax.Array, invalid: jax.Array | None) -> jax.Array:
    """Flags [1|B, T] or [1|B, T, N], and those of `invalid_queries`."""
    if invalid is None:
        return flags
    return jnp.where(invalid.reshape(*invalid.shape, *(1,) * (flags.ndim - 2)), INVALID, flags)


def cleared_by_xla(x: jax.Array, flags: jax.Array) -> jax.Array:
    """x with 0 in padding rows, and NaN in invalid ones.

    `flags` are those above, or bool if no row is invalid. Their axes are the first ones of x, and
    may broadcast; the others are a row.
    """
    flags = flags.reshape(*flags.shape, *(1,) * (x.ndim - flags.ndim))
    x = jnp.where(flags == PADDING, 0, x)
    return x if flags.dtype == bool else jnp.where(flags == INVALID, jnp.nan, x)
