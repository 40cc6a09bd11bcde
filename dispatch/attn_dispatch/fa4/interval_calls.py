"""The custom calls of compiled FlashAttention-4, whose mask is intervals of keys or a bit a pair.

Arrays are query [B, T, N, H], key [B, S, K, H] and value [B, S, K, Hv]; out is [B, T, N, Hv] and
lse float32 [B, N, T].

A mask has one of two forms. In int32 [1|B, T, 4], a row sees the keys from the first number on, as
many as the second says, and likewise those of the third and fourth. In uint32 [1|B, 1|N, T, W], it
sees key s if bit s % 32 of word s // 32 is set; bits past the last key are 0.

`lists` have the tiles of which some pairs are visible, and those of which all are, each as int32
[1|B, 1|N, M] counts and [1|B, 1|N, M, L] ascending indices: for the forward pass a line for each
tile of query rows, and for the backward pass one for each tile of keys. Tiles are those of the set
of kernels that runs the call.

Kernels of a variant change scores before the mask; `change` has its digest and the arrays that it
reads, each of any shape, as float32 or int32.

Sinks [1|B, N] are scores of one more key, whose value is 0, of all rows that see a key: out and lse
of a forward pass include them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import BACKWARD_TARGET, FORWARD_TARGET, KernelSet
from attn_dispatch.semantics.wider_arrays import pad_last, round_up

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An array, or its shape and dtype."""


@dataclass(frozen=True)
class Change:
    """A change of scores, by the kernels of a variant."""

    variant: str = ""
    """Its digest; "" for none."""
    arrays: tuple[jax.Array, ...] = ()


NO_CHANGE = Change()


def forward_set(
    query: jax.Array, value: jax.Array, arch: str = "sm90", variant: str = ""
) -> KernelSet:
    """The kernels that run a forward pass on this architecture.

    Raises:
      ValueError: no compiled set is for these arrays.
    """
    return _set_for(query, value, arch, variant, is_backward=False)


def backward_set(
    query: jax.Array, value: jax.Array, arch: str = "sm90", variant: str = ""
) -> KernelSet:
    """The same for a backward pass."""
    return _set_for(query, value, arch, variant, is_backward=True)


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    lists: Sequence[jax.Array],
    scale: float,
    arch: str = "sm90",
    change: Change = NO_CHANGE,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out and lse."""
    kernels = forward_set(query, value, arch, change.variant)
    query_wide, key_wide = (pad_last(x, kernels.head_dim) for x in (query, key))
    value_wide = pad_last(value, kernels.head_dim_v)
    batch, length, heads, _ = query.shape
    results = [
        jax.ShapeDtypeStruct((batch, length, heads, kernels.head_dim_v), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
    ]
    further = [*([] if sinks is None else [sinks.astype(jnp.float32)]), *_flat(change)]
    operands = (query_wide, key_wide, value_wide, *lists, mask, *further)
    call = jax.ffi.ffi_call(FORWARD_TARGET, results)
    attributes = _attributes(kernels, kernels.forward_tiles, mask, scale)
    out, lse = call(*operands, **attributes, sinks=sinks is not None)
    return out[..., : value.shape[-1]], lse


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    out_grad: jax.Array,
    lse_grad: jax.Array | None,
    mask: jax.Array,
    lists: Sequence[jax.Array],
    scale: float,
    arch: str = "sm90",
    change: Change = NO_CHANGE,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, and Σ out · out_grad - lse_grad of each row [B, N, T].

    A `lse_grad` of None is zero. out and lse include the call's sinks, if it has any.
    """
    kernels = backward_set(query, value, arch, change.variant)
    query_wide, key_wide = (pad_last(x, kernels.head_dim) for x in (query, key))
    columns = (pad_last(x, kernels.head_dim_v) for x in (value, out, out_grad))
    value_wide, out_wide, out_grad_wide = columns
    if lse_grad is None:
        lse_grad = jnp.zeros_like(lse)
    operands = (query_wide, key_wide, value_wide, out_wide, lse, out_grad_wide, lse_grad)
    grads = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query_wide, key_wide, value_wide)]
    results = [*grads, *_scratch(kernels, query, key)]
    call = jax.ffi.ffi_call(BACKWARD_TARGET, results)
    attributes = _attributes(kernels, kernels.backward_tiles, mask, scale)
    dq, dk, dv, products, *_ = call(*operands, *lists, mask, *_flat(change), **attributes)
    width, width_v = query.shape[-1], value.shape[-1]
    gradients = dq[..., :width], dk[..., :width], dv[..., :width_v]
    return *gradients, products[..., : query.shape[1]]


def _flat(change: Change) -> list[jax.Array]:
    """The arrays of a change as kernels take them."""

    def flat(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float32 if is_float else jnp.int32).reshape(-1)

    return [flat(x) for x in change.arrays]


def scratch_bytes(kernels: KernelSet, query: Shaped, key: Shaped) -> int:
    """Bytes of scratch memory of a backward pass."""
    return sum(x.size * x.dtype.itemsize for x in _scratch(kernels, query, key))


def _scratch(kernels: KernelSet, query: Shaped, key: Shaped) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Two numbers for each query row, the sums of dq and, if heads are grouped, of dk and dv."""
    batch, length, heads, _ = query.shape
    keys, kv_heads = key.shape[1:3]
    rows = round_up(length, kernels.backward_tile_m)
    shapes = [(batch, heads, rows), (batch, heads, rows), (batch, heads, rows * kernels.head_dim)]
    if heads != kv_heads:
        padded = round_up(keys, kernels.backward_tile_n)
        widths = (kernels.head_dim, kernels.head_dim_v)
        shapes += [(batch, kv_heads, padded * x) for x in widths]
    return tuple(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)


def _attributes(
    kernels: KernelSet, tiles: tuple[int, int], mask: jax.Array, scale: float
) -> dict[str, str | np.generic]:
    tile_m, tile_n = tiles
    return {
        "set": kernels.name,
        "mask": "bits" if mask.dtype == jnp.uint32 else "rows",
        "tile_m": np.int64(tile_m),
        "tile_n": np.int64(tile_n),
        "scale": np.float32(scale),
    }


def _set_for(
    query: jax.Array, value: jax.Array, arch: str, variant: str, *, is_backward: bool
) -> KernelSet:
    library = compiled.find().on(arch)
    if not library.is_usable:
        raise RuntimeError(library.unusable_reason)
    width, width_v, dtype = query.shape[-1], value.shape[-1], str(query.dtype)
    is_grouped = query.shape[2] != value.shape[2]
    found = library.set_for(
        width, width_v, dtype, variant=variant, has_grouped_gradients=is_backward and is_grouped
    )
    if found is None:
        known = compiled.names(x for x in library.sets if not x.is_wide)
        raise ValueError(
            f"head dims and dtype: expected at most those of a compiled set of "
            f"FlashAttention-4's kernels for {arch} ({known}), got "
            f"{width}/{width_v} {dtype}{variant and f' with the score_mod of digest {variant}'}"
        )
    return found
