"""Flags of rows that kernels leave unspecified: padding rows become 0, and invalid rows NaN."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.invalid_values import invalid_queries

PADDING, REAL, INVALID = (np.uint8(x) for x in range(3))
"""The flags of cuda_backend/clear_rows.h."""


def flags_of(spec: AttentionSpec, operands: Mapping[str, jax.Array], real: jax.Array) -> jax.Array:
    """The flags of the output's rows, uint8 [1|B, T], of which `real` [1|B, T] are real."""
    flags = jnp.where(real, REAL, PADDING)
    invalid = invalid_queries(spec, operands)
    return flags if invalid is None else jnp.where(invalid, INVALID, flags)


def cleared_by_xla(x: jax.Array, flags: jax.Array) -> jax.Array:
    """x [..., heads, D] with 0 in padding rows, and NaN in invalid ones.

    `flags` [...], which may broadcast, are those above, or bool if no row is invalid.
    """
    flags = flags[..., None, None]
    x = jnp.where(flags == PADDING, 0, x)
    return x if flags.dtype == bool else jnp.where(flags == INVALID, jnp.nan, x)
