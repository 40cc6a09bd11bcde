"""The arrays of a call's mask, bound beside its operands, so that all layers share them.

A mask's arrays are made at each call's place, by a primitive whose results JAX keeps
(made_once.py). They follow the operands of attn_fwd and attn_bwd, and are no operands: neither the
options nor the spec of a call know of them, and what does not need them ignores them. Then the
primitive has the parameter `tiles`, which says in which tiles the lists of both directions are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.made_once import ConstantMaker, KeptMaker, made_once
from attn_dispatch.devices.device import Device
from attn_dispatch.semantics.band_masks import (
    MAX_BYTES,
    band_lists,
    band_rows,
    rows_bytes,
    static_band,
)
from attn_dispatch.semantics.diagonal import KeyBand
from attn_dispatch.semantics.interval_plan import PlanTiles, band_of, grid_of
from attn_dispatch.semantics.intervals import ranges, rows_of
from attn_dispatch.semantics.mask_arrays import MaskArrays, MaskRows, real_and_invalid
from attn_dispatch.semantics.mask_data import mask_lists
from attn_dispatch.semantics.mask_spec import mask_operands, mask_spec
from attn_dispatch.semantics.tile_lists import TileGrid, TileLists, TileSizes

_LISTS = 4
"""The number of arrays of lists."""


@runtime_checkable
class TakesMask(Protocol):
    """An implementation whose kernels take a mask as arrays."""

    def mask_tiles(self, spec: AttentionSpec, device: Device) -> TileSizes | None:
        """The tiles in which they take the call's mask; None if they do not run the call."""
        ...

    def forward(
        self,
        spec: AttentionSpec,
        device: Device,
        operands: Mapping[str, jax.Array],
        mask: MaskArrays | None = None,
    ) -> tuple[jax.Array, ...]:
        """As of `Implementation`, with the arrays of the mask if they are there."""
        ...

    def backward(
        self,
        spec: AttentionSpec,
        device: Device,
        operands: Mapping[str, jax.Array],
        mask: MaskArrays | None = None,
    ) -> tuple[jax.Array, ...]: ...


def forward_arrays(
    options: AttentionOptions, operands: Sequence[jax.Array], tiles: PlanTiles
) -> tuple[jax.Array, ...]:
    """The arrays that follow the operands of a forward call."""
    call = LeadingCall.of(operands, options)
    rows = _mask_rows(call, options, operands)
    lists = _lists(call.spec, rows[0], tiles.forward, is_backward=False)
    return tuple(map(call.unfold_shared, (*rows, *lists)))


def _mask_rows(
    call: LeadingCall, options: AttentionOptions, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """The arrays of a call's `MaskRows`."""
    band = static_band(call.spec)
    if band is not None and rows_bytes(call.spec.seq_len_q) <= MAX_BYTES:
        return made_once(_BandRows(call.spec.seq_len_q, call.spec.seq_len_kv, band))
    names, given = mask_operands(call.spec), dict(zip(options.operands, operands, strict=True))
    folded = call.fold({name: given[name] for name in names})
    made = made_once(_Ranges(mask_spec(call.spec), names), *folded.values())
    flags = MaskRows.number_of_flags(call.spec)
    ends = made[flags:]
    union = (_Union if len(ends) > 2 else _Rows)(call.spec.seq_len_q)
    return [*made_once(union, *ends), *made[:flags]]


def backward_arrays(
    options: AttentionOptions,
    operands: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    tiles: PlanTiles,
) -> tuple[jax.Array, ...]:
    """The arrays that follow the operands of the backward call.

    Args:
      options: those of the forward call.
      operands: those of the forward call.
      arrays: those that follow them.
      tiles: the tiles of both directions.
    """
    call = LeadingCall.of(operands, options)
    rows = arrays[:-_LISTS]
    made = _lists(call.spec, call.fold_shared(rows[0]), tiles.backward, is_backward=True)
    return (*rows, *map(call.unfold_shared, made))


def mask_of(spec: AttentionSpec, arrays: Sequence[jax.Array], tiles: PlanTiles) -> MaskArrays:
    """The mask of a call with one batch axis, from the arrays that follow its operands."""
    rows, lists = MaskRows.from_arrays(spec, arrays[:-_LISTS]), TileLists(*arrays[-_LISTS:])
    return MaskArrays(rows, lists, tiles.backward if spec.is_backward else tiles.forward)


@dataclass(frozen=True)
class _Ranges:
    """Makes the flags of a call's `MaskRows` that are there, then the ends of its ranges."""

    spec: AttentionSpec
    names: tuple[str, ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        operands = dict(zip(self.names, arrays, strict=True))
        flags = [x for x in real_and_invalid(self.spec, operands) if x is not None]
        return [*flags, *(x for ends in ranges(self.spec, operands) for x in ends)]


@dataclass(frozen=True)
class _Rows:
    """Makes rows of the ends of ranges."""

    queries: int

    def __call__(self, *ends: jax.Array) -> list[jax.Array]:
        given = list(zip(ends[::2], ends[1::2], strict=True))
        return [rows_of(given, self.queries)]


class _Union(_Rows, KeptMaker):
    """Makes rows of the ends of several ranges."""


@dataclass(frozen=True)
class _Lists(KeptMaker):
    """Makes the lists of one direction from rows and the ends of their band."""

    grid: TileGrid
    is_backward: bool

    def __call__(self, rows: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, ...]:
        return mask_lists(rows, self.grid, (low, high), is_backward=self.is_backward).arrays


@dataclass(frozen=True)
class _BandRows(ConstantMaker):
    """Makes the rows of a static band."""

    queries: int
    keys: int
    band: KeyBand

    def constants(self) -> list[np.ndarray]:
        return [band_rows(self.queries, self.keys, self.band)]


@dataclass(frozen=True)
class _BandLists(ConstantMaker):
    """Makes the lists of one direction of a static band."""

    grid: TileGrid
    band: KeyBand
    is_backward: bool

    def constants(self) -> tuple[np.ndarray, ...]:
        return band_lists(self.grid, self.band, is_backward=self.is_backward)


def _lists(
    spec: AttentionSpec, rows: jax.Array, tile: TileSizes, *, is_backward: bool
) -> list[jax.Array]:
    grid, band = grid_of(spec, tile), static_band(spec)
    size = grid.backward_bytes(1) if is_backward else grid.forward_bytes(1)
    if band is not None and size <= MAX_BYTES:
        return made_once(_BandLists(grid, band, is_backward))
    low, high = band_of(spec).ends
    return made_once(_Lists(grid, is_backward), rows, low, high)
