"""The intervals and the lists of tiles of a call's mask, made once for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.made_once import made_once
from attn_dispatch.semantics.interval_plan import PlanTiles, plan_grids
from attn_dispatch.semantics.intervals import Intervals
from attn_dispatch.semantics.mask_spec import mask_operands, mask_spec
from attn_dispatch.semantics.tile_lists import (
    TileGrid,
    TileLists,
    backward_lists,
    forward_lists,
)


@dataclass(frozen=True)
class MaskArrays:
    """What a kernel reads of a mask. A call of one direction uses the lists of that direction."""

    rows: jax.Array
    """int32 [1|B, T, 4]; see `Intervals`."""
    unknown: jax.Array | None
    """bool scalar; see `Intervals`."""
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
    rows, *unknown = made_once(_Rows(mask_spec(spec), names), *arrays)
    forward, backward = plan_grids(spec, tiles)
    return MaskArrays(
        rows,
        unknown[0] if unknown else None,
        TileLists(*made_once(_Lists(forward, is_backward=False), rows)),
        TileLists(*made_once(_Lists(backward, is_backward=True), rows)) if has_backward else None,
    )


@dataclass(frozen=True)
class _Rows:
    """Makes the rows and, if there is one, the flag of a call's intervals."""

    spec: AttentionSpec
    names: tuple[str, ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        found = Intervals.of(self.spec, dict(zip(self.names, arrays, strict=True)))
        return [found.rows] if found.unknown is None else [found.rows, found.unknown]


@dataclass(frozen=True)
class _Lists:
    """Makes the lists of one direction from rows."""

    grid: TileGrid
    is_backward: bool

    def __call__(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        make = backward_lists if self.is_backward else forward_lists
        return make(rows, self.grid).arrays
