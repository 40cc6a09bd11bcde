"""The arrays of compiled FlashAttention-4's custom calls, described without any memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.fa4.compiled import KernelSet

_BYTES = {"int32": 4, "uint32": 4, "float32": 4}
_ADDRESS = 1 << 20

Described = tuple[int, str, list[int], int]
"""An array as the handlers' module takes it: address, dtype, shape, bytes."""


@dataclass(frozen=True)
class Array:
    """An array of a call. `bytes` of None are those of its shape."""

    dtype: str
    shape: tuple[int, ...]
    address: int = _ADDRESS
    bytes: int | None = None

    @property
    def described(self) -> Described:
        size = (
            math.prod(self.shape) * _BYTES.get(self.dtype, 2) if self.bytes is None else self.bytes
        )
        # As an int64 overflows, so that no check is helped by Python's larger numbers.
        size = (size + 2**63) % 2**64 - 2**63
        return self.address, self.dtype, [*self.shape], size

    def changed(self, **what: object) -> Array:
        return dataclasses.replace(self, **what)

    def with_extent(self, axis: int, extent: int) -> Array:
        shape = list(self.shape)
        shape[axis] = extent
        return self.changed(shape=tuple(shape))


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass: its operands and results by name, in their order."""

    kernels: KernelSet
    operands: dict[str, Array]
    results: dict[str, Array]
    is_backward: bool

    @property
    def has_bits(self) -> bool:
        return "bits" in self.operands

    @property
    def has_sinks(self) -> bool:
        return "sinks" in self.operands

    def changed(self, **arrays: Array) -> Pass:
        """The pass with these arrays in place of those of the same names."""
        assert set(arrays) <= {*self.operands, *self.results}
        operands = {x: arrays.get(x, y) for x, y in self.operands.items()}
        results = {x: arrays.get(x, y) for x, y in self.results.items()}
        return dataclasses.replace(self, operands=operands, results=results)

    def __getitem__(self, name: str) -> Array:
        return {**self.operands, **self.results}[name]


def made(
    kernels: KernelSet,
    shape: tuple[int, int, int, int, int],
    *,
    is_backward: bool,
    masks: int = 1,
    mask_heads: int | None = None,
    has_sinks: bool = False,
) -> Pass:
    """A pass of shape (B, T, S, N, K) whose mask, and sinks if it has any, have `masks` batch rows.

    With `mask_heads`, the mask is bits of so many heads; without, rows.
    """
    batch, rows, keys, heads, kv_heads = shape
    dtype = kernels.dtype
    query = Array(dtype, (batch, rows, heads, kernels.head_dim))
    key = Array(dtype, (batch, keys, kv_heads, kernels.head_dim))
    value = Array(dtype, (batch, keys, kv_heads, kernels.head_dim_v))
    out = Array(dtype, (batch, rows, heads, kernels.head_dim_v))
    lse = Array("float32", (batch, heads, rows))
    operands, results = {"query": query, "key": key, "value": value}, {"out": out, "lse": lse}
    tile_m, tile_n = kernels.backward_tiles if is_backward else kernels.forward_tiles
    tiles = (-(-rows // tile_m), -(-keys // tile_n))
    if is_backward:
        operands |= {"out": out, "lse": lse, "out_grad": out, "lse_grad": lse}
        results = {"dq": query, "dk": key, "dv": value, **scratch(kernels, shape)}
        tiles = tiles[::-1]
    for kind in ("partial", "full"):
        operands[f"{kind}_counts"] = Array("int32", (masks, mask_heads or 1, tiles[0]))
        operands[f"{kind}_indices"] = Array("int32", (masks, mask_heads or 1, *tiles))
    if mask_heads is None:
        operands["rows"] = Array("int32", (masks, rows, 4))
    else:
        operands["bits"] = Array("uint32", (masks, mask_heads, rows, -(-keys // 32)))
    if has_sinks:
        operands["sinks"] = Array("float32", (masks, heads))
    for i, letter in enumerate(kernels.variant_arrays):
        operands[f"mod_{i}"] = Array("float32" if letter == "f" else "int32", (5 + i,))
    return Pass(kernels, operands, results, is_backward)


def tangent(
    kernels: KernelSet,
    shape: tuple[int, int, int, int, int],
    *,
    masks: int = 1,
    mask_heads: int | None = None,
) -> Pass:
    """A tangent of shape (B, T, S, N, K), with a mask as of `made`."""
    by_tile = dataclasses.replace(
        kernels, forward_tile_m=kernels.tangent_tile_m, forward_tile_n=kernels.tangent_tile_n
    )
    forward = made(by_tile, shape, is_backward=False, masks=masks, mask_heads=mask_heads)
    mask = dict(forward.operands)
    given = {x: mask.pop(x) for x in ("query", "key", "value")}
    moved = {f"{x}_tangent": y for x, y in given.items()}
    results = {f"{x}_tangent": y for x, y in forward.results.items()}
    return Pass(kernels, given | moved | forward.results | mask, results, is_backward=False)


def wide(
    kernels: KernelSet,
    shape: tuple[int, int, int, int, int],
    *,
    is_backward: bool,
    columns: int | None = None,
    unseen: int = 0,
) -> Pass:
    """A pass of wide heads of shape (B, T, S, N, K), in which `unseen` queries see nothing."""
    batch, rows, keys, heads, kv_heads = shape
    columns = columns or kernels.head_dim
    query = Array(kernels.dtype, (batch, rows, heads, columns))
    key = Array(kernels.dtype, (batch, keys, kv_heads, columns))
    numbers = Array("float32", (batch, heads, rows - unseen))
    operands = {"query": query, "key": key, "value": key}
    if not is_backward:
        return Pass(kernels, operands, {"out": query, "lse": numbers}, is_backward)
    tile = kernels.backward_tile_m
    padded = numbers.with_extent(2, -(-numbers.shape[2] // tile) * tile)
    operands |= {"out_grad": query, "lse2": padded, "products": padded}
    return Pass(kernels, operands, {"dq": query, "dk": key, "dv": key}, is_backward)


def scratch(kernels: KernelSet, shape: tuple[int, int, int, int, int]) -> dict[str, Array]:
    """The scratch arrays of a backward pass."""
    batch, rows, keys, heads, kv_heads = shape
    padded = -(-rows // kernels.backward_tile_m) * kernels.backward_tile_m
    padded_keys = -(-keys // kernels.backward_tile_n) * kernels.backward_tile_n
    numbers = Array("float32", (batch, heads, padded))
    arrays = {"products": numbers, "lse2": numbers}
    arrays["query_sums"] = numbers.with_extent(2, padded * kernels.head_dim)
    if heads != kv_heads:
        sums = Array("float32", (batch, kv_heads, padded_keys * kernels.head_dim))
        arrays["key_sums"] = sums
        arrays["value_sums"] = sums.with_extent(2, padded_keys * kernels.head_dim_v)
    return arrays


def called_with_zeros(target: str, call: Pass, attributes: dict[str, object]) -> list[jax.Array]:
    """The results of a call of zeros; None as an attribute leaves it out."""
    given = {x: y for x, y in attributes.items() if y is not None}
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.results.values()]

    def program():
        operands = [jnp.zeros(x.shape, x.dtype) for x in call.operands.values()]
        return jax.ffi.ffi_call(target, results)(*operands, **given)

    return jax.block_until_ready(jax.jit(program)())
