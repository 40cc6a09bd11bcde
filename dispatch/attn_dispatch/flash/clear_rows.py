"""Rows of packed arrays that do not count: 0, or NaN where something is wrong.

Kernels write nothing there, or what nobody asked for. The CUDA library clears such rows in place;
XLA, where that is not built, reads and writes the whole array.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices import native as native_libraries
from attn_dispatch.semantics.invalid_values import invalid_queries

TARGET = "attn_dispatch_clear_rows"

_PADDING, _REAL, _INVALID = (np.uint8(x) for x in range(3))
"""As cuda_backend/clear_rows.h has them."""


def flags_of(spec: AttentionSpec, operands: Mapping[str, jax.Array], real: jax.Array) -> jax.Array:
    """uint8 [1|B, T] of queries, for the output."""
    flags = jnp.where(real, _REAL, _PADDING)
    invalid = invalid_queries(spec, operands)
    return flags if invalid is None else jnp.where(invalid, _INVALID, flags)


def cleared(x: jax.Array, flags: jax.Array) -> jax.Array:
    """x [rows, heads, D] with 0 where its row's flag is 0, and NaN where it is 2."""
    if _native() is None:
        return cleared_by_xla(x, flags)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(TARGET, shape, input_output_aliases={0: 0})
    return call(x, flags.astype(jnp.uint8))


def cleared_by_xla(x: jax.Array, flags: jax.Array) -> jax.Array:
    """The same of x [..., heads, D] with as many flags [...] as rows, or 1 for all of them."""
    flags = flags[..., None, None]
    x = jnp.where(flags == _PADDING, 0, x)
    return x if flags.dtype == bool else jnp.where(flags == _INVALID, jnp.nan, x)


@lru_cache(maxsize=1)
def register() -> None:
    """Make the custom call known to XLA, if the CUDA library is here."""
    if (native := _native()) is not None:
        jax.ffi.register_ffi_target(TARGET, native.clear_rows_handlers(), platform="CUDA")


@lru_cache(maxsize=1)
def _native() -> ModuleType | None:
    try:
        return native_libraries.load(native_libraries.CUDA)
    except ImportError:
        return None
