"""Clearing the rows that kernels leave unspecified: padding rows become 0, and invalid rows NaN.

Flags say which rows these are or, if only rows past the last packed sequence are padding, the
offsets of the sequences. The CUDA library clears rows in place, and touches no others. Without it,
XLA reads and writes the whole array.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from types import ModuleType

import jax
import jax.numpy as jnp

from attn_dispatch.devices import native_libraries
from attn_dispatch.semantics.row_flags import INVALID, PADDING, REAL, cleared_by_xla

TARGET = "attn_dispatch_clear_rows"
ENDS_TARGET = "attn_dispatch_clear_ends"
TARGETS = (TARGET, ENDS_TARGET)

_ROW_BYTES = 16
"""The bytes of a row are a multiple of it (kRowMultiple of cuda_backend/clear_rows.h)."""


MOST_ARRAYS = 4
"""The number of arrays that one custom call clears (kMostArrays of the same file)."""


def cleared(x: jax.Array, flags: jax.Array) -> jax.Array:
    """x with 0 in padding rows, and NaN in invalid ones. XLA copies x if anything else reads it.

    Args:
      x: an array of rows.
      flags: as in row_flags.py, or bool if no row is invalid. Their axes are the first ones of x,
        and may broadcast; the others are a row.
    """
    return cleared_together((x, flags))[0]


def cleared_together(*pairs: tuple[jax.Array, jax.Array | None]) -> list[jax.Array]:
    """Arrays with flags as `cleared` takes them, by one kernel; None leaves an array as it is.

    XLA waits for all arrays before it clears any. If one of them comes from a kernel that reads
    another as it was, the kernel has run by then, and the other need not be copied.
    """
    found = [x for x, _ in pairs]
    in_place: list[int] = []
    for i, (x, flags) in enumerate(pairs):
        if flags is None:
            continue
        row_bytes = prod(x.shape[flags.ndim :]) * x.dtype.itemsize
        if _native() is None or row_bytes % _ROW_BYTES:
            found[i] = cleared_by_xla(x, flags)
        else:
            in_place.append(i)
    if in_place:
        assert len(in_place) <= MOST_ARRAYS
        rows = [_with_flags(*pairs[i]) for i in in_place]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in rows]
        aliases = {i: i for i in range(len(rows))}
        call = jax.ffi.ffi_call(TARGET, shapes, input_output_aliases=aliases)
        results = call(*(x for x, _ in rows), *(flags for _, flags in rows))
        for i, x in zip(in_place, results, strict=True):
            found[i] = x.reshape(found[i].shape)
    return found


def _with_flags(x: jax.Array, flags: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """x as an array of rows, and a flag of each, as the custom call takes them."""
    assert flags is not None
    flags = jnp.broadcast_to(flags, x.shape[: flags.ndim]).astype(jnp.uint8)
    return x.reshape(flags.size, *x.shape[flags.ndim :]), flags.reshape(-1)


def ends_cleared(
    offsets: jax.Array, arrays: Sequence[jax.Array], lse: jax.Array | None, *, invalid_is_nan: bool
) -> list[jax.Array]:
    """Arrays, and lse after them if it is given, without what kernels left past the last sequence.

    Args:
      offsets: int32 [M + 1], from 0. Rows from the last one on are padding: 0, and -inf in lse. If
        all offsets are the number of rows instead, all rows are invalid.
      arrays: [rows, ...], with a multiple of 4 bytes in each row.
      lse: float32 [heads, rows].
      invalid_is_nan: whether invalid rows become NaN, rather than as padding.
    """
    if _native() is None:
        return _ends_cleared_by_xla(offsets, arrays, lse, invalid_is_nan=invalid_is_nan)
    given = [*arrays, *([] if lse is None else [lse])]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    aliases = {i: i for i in range(len(given))}
    call = jax.ffi.ffi_call(ENDS_TARGET, shapes, input_output_aliases=aliases)
    return list(call(*given, offsets, has_lse=lse is not None, invalid_is_nan=invalid_is_nan))


def _ends_cleared_by_xla(
    offsets: jax.Array, arrays: Sequence[jax.Array], lse: jax.Array | None, *, invalid_is_nan: bool
) -> list[jax.Array]:
    row = jnp.arange(len(arrays[0]), dtype=jnp.int32)
    flags = jnp.where(row < offsets[-1], REAL, PADDING)
    flags = jnp.where(row < offsets[0], INVALID if invalid_is_nan else PADDING, flags)
    found = [cleared_by_xla(x, flags) for x in arrays]
    if lse is not None:
        lse = jnp.where(flags == PADDING, -jnp.inf, lse)
        found.append(jnp.where(flags == INVALID, jnp.nan, lse))
    return found


@lru_cache(maxsize=1)
def register() -> None:
    """Register the custom calls with XLA, if the CUDA library is installed."""
    if (native := _native()) is not None:
        register_handlers(native, "CUDA")


def register_handlers(native: ModuleType, platform: str) -> None:
    """Register the handlers of a `_cuda` module as custom calls of this XLA platform."""
    jax.ffi.register_ffi_target(TARGET, native.clear_rows_handlers(), platform=platform)
    jax.ffi.register_ffi_target(ENDS_TARGET, native.clear_ends_handlers(), platform=platform)


@lru_cache(maxsize=1)
def _native() -> ModuleType | None:
    try:
        return native_libraries.load(native_libraries.CUDA)
    except ImportError:
        return None
