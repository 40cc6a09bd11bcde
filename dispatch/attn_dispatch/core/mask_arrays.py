"""A call's mask as data and its lists of tiles, made once for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.made_once import made_once
from attn_dispatch.semantics.interval_plan import PlanTiles, plan_grids
from attn_dispatch.semantics.mask_data import mask_data, mask_lists
from attn_dispatch.semantics.mask_spec import mask_operands, mask_spec
from attn_dispatch.semantics.tile_lists import TileGrid, TileLists


@dataclass(frozen=True)
class MaskArrays:
    """What a kernel reads of a mask. A call of one direction uses the lists of that direction."""

    mask: jax.Array
    """Intervals or bits, as in mask_data.py."""
    forward: TileLists
    backward: TileLists | None


def mask_arrays(
    spec: AttentionSpec,
    operands: Mapping[str, jax.Array],
    tiles: PlanTiles,
    *,
    has_backward: bool,
) -> MaskArrays:
    """The arrays of a call for which `interval_plan.not_supported_reasons` is empty.

    Args:
      spec: the call of either direction.
      operands: its arrays; those of `mask_operands` are enough.
      tiles: the tiles of the kernels of both directions.
      has_backward: whether the backward pass will be computed.
    """
    names = mask_operands(spec)
    arrays = [operands[name] for name in names]
    # A primitive for each, so that JAX drops those that nothing reads.
    (mask,) = made_once(_Mask(mask_spec(spec), names), *arrays)
    forward, backward = plan_grids(spec, tiles)
    return MaskArrays(
        mask,
        TileLists(*made_once(_Lists(forward, is_backward=False), mask)),
        TileLists(*made_once(_Lists(backward, is_backward=True), mask)) if has_backward else None,
    )


@dataclass(frozen=True)
class _Mask:
    """Makes the intervals or bits of a call's mask."""

    spec: AttentionSpec
    names: tuple[str, ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return [mask_data(self.spec, dict(zip(self.names, arrays, strict=True)))]


@dataclass(frozen=True)
class _Lists:
    """Makes the lists of one direction from a mask."""

    grid: TileGrid
    is_backward: bool

    def __call__(self, mask: jax.Array) -> tuple[jax.Array, ...]:
        return mask_lists(mask, self.grid, is_backward=self.is_backward).arrays
