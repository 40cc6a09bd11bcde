"""Clearing the rows that kernels leave unspecified: padding rows become 0, and invalid rows NaN.

The CUDA library clears them in place, and touches no other row. Without it, XLA reads and writes
the whole array.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from types import ModuleType

import jax
import jax.numpy as jnp

from attn_dispatch.devices import native_libraries
from attn_dispatch.semantics.row_flags import cleared_by_xla

TARGET = "attn_dispatch_clear_rows"

_ROW_BYTES = 16
"""The bytes of a row are a multiple of it (kRowMultiple of cuda_backend/clear_rows.h)."""


def cleared(x: jax.Array, flags: jax.Array) -> jax.Array:
    """x with 0 in padding rows, and NaN in invalid ones. XLA copies x if anything else reads it.

    Args:
      x: an array of rows.
      flags: as in row_flags.py, or bool if no row is invalid. Their axes are the first ones of x,
        and may broadcast; the others are a row.
    """
    lead, row = x.shape[: flags.ndim], x.shape[flags.ndim :]
    if _native() is None or prod(row) * x.dtype.itemsize % _ROW_BYTES:
        return cleared_by_xla(x, flags)
    flags = jnp.broadcast_to(flags, lead).astype(jnp.uint8).reshape(-1)
    rows = jax.ShapeDtypeStruct((flags.size, *row), x.dtype)
    call = jax.ffi.ffi_call(TARGET, rows, input_output_aliases={0: 0})
    return call(x.reshape(rows.shape), flags).reshape(x.shape)


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
