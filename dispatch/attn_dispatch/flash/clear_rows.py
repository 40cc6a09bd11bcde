"""Clearing rows of packed arrays: padding rows become 0 and invalid rows NaN.

Kernels leave such rows unspecified. The CUDA library clears them in place; without it, XLA reads
and writes the whole array.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices import native_libraries
from attn_dispatch.semantics.invalid_values import invalid_queries

TARGET = "attn_dispatch_clear_rows"

_PADDING, _REAL, _INVALID = (np.uint8(x) for x in range(3))
"""The flags of cuda_backend/clear_rows.h."""


def flags_of(spec: AttentionSpec, operands: Mapping[str, jax.Array], real: jax.Array) -> jax.Array:
    """The flags of the output's rows, uint8 [1|B, T]."""
    flags = jnp.where(real, _REAL, _PADDING)
    invalid = invalid_queries(spec, operands)
    return flags if invalid is None else jnp.where(invalid, _INVALID, flags)


def cleared(x: jax.Array, flags: jax.Array) -> jax.Array:
    """x [rows, heads, D] with 0 where the row's flag is 0, and NaN where it is 2."""
    if _native() is None:
        return cleared_by_xla(x, flags)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(TARGET, shape, input_output_aliases={0: 0})
    return call(x, flags.astype(jnp.uint8))


def cleared_by_xla(x: jax.Array, flags: jax.Array) -> jax.Array:
    """`cleared` in JAX's operations, for x [..., heads, D] and flags [...], which may broadcast."""
    flags = flags[..., None, None]
    x = jnp.where(flags == _PADDING, 0, x)
    return x if flags.dtype == bool else jnp.where(flags == _INVALID, jnp.nan, x)


@lru_cache(maxsize=1)
def register() -> None:
    """Register the custom call with XLA, if the CUDA library is installed."""
    if (native := _native()) is not None:
        jax.ffi.register_ffi_target(TARGET, native.clear_rows_handlers(), platform="CUDA")


@lru_cache(maxsize=1)
def _native() -> ModuleType | None:
    try:
        return native_libraries.load(native_libraries.CUDA)
    except ImportError:
        return None
