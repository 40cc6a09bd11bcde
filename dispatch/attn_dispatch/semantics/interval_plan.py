"""What a kernel needs to skip the unseen tiles of a call: its mask and its lists of tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import mask_data
from attn_dispatch.semantics.intervals import is_certain
from attn_dispatch.semantics.key_bands import KeyBand
from attn_dispatch.semantics.tile_lists import TileGrid, TileLists, TileSizes

_MAX_LISTS_BYTES = 2**28
"""The most bytes of the lists of one direction. Without a band, 262,144 queries and keys have lists
of 2^25 bytes in tiles of 128."""


@dataclass(frozen=True)
class PlanTiles:
    """The tiles of both directions."""

    forward: TileSizes
    backward: TileSizes
    """The queries of a tile are those that an entry of a backward list stands for."""


@dataclass(frozen=True)
class MaskPlan:
    """The mask of a call and, made when they are asked for, its lists of tiles.

    Everything is made by XLA, wherever it is asked for. It depends on nothing that changes from
    layer to layer: core/mask_arrays.py makes it once for all of them.
    """

    mask: jax.Array
    """Intervals or bits, as in mask_data.py."""
    grids: tuple[TileGrid, TileGrid]
    """The tiles of the forward and of the backward pass."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array], tiles: PlanTiles) -> MaskPlan:
        """The plan of a call for which `not_supported_reasons` is empty."""
        return MaskPlan(mask_data.mask_data(spec, operands), plan_grids(spec, tiles))

    @cached_property
    def attends(self) -> jax.Array:
        """bool [1|B, 1|N, T]: the query sees some key."""
        return mask_data.attends(self.mask)

    @cached_property
    def forward(self) -> TileLists:
        """For each tile of queries, its tiles of keys."""
        return mask_data.mask_lists(self.mask, self.grids[0], is_backward=False)

    @cached_property
    def backward(self) -> TileLists:
        """For each tile of keys, its tiles of queries."""
        return mask_data.mask_lists(self.mask, self.grids[1], is_backward=True)


def lists_bytes(spec: AttentionSpec, tiles: PlanTiles) -> tuple[int, int]:
    """Bytes of the forward and of the backward lists, if every batch row has its own."""
    forward, backward = plan_grids(spec, tiles)
    masks = mask_data.masks_of_lists(spec)
    return forward.forward_bytes(masks), backward.backward_bytes(masks)


def plan_grids(spec: AttentionSpec, tiles: PlanTiles) -> tuple[TileGrid, TileGrid]:
    """The tiles of the forward and of the backward pass."""
    band = KeyBand.of(spec) if is_certain(spec) else KeyBand()
    forward, backward = (
        TileGrid(spec.seq_len_q, spec.seq_len_kv, tile, band)
        for tile in (tiles.forward, tiles.backward)
    )
    return forward, backward


@dataclass(frozen=True)
class _Planned:
    spec: AttentionSpec
    tiles: PlanTiles

    @property
    def bytes(self) -> int:
        """Bytes of the lists of the direction that the spec has."""
        return lists_bytes(self.spec, self.tiles)[int(self.spec.is_backward)]


_LISTS = Rule[_Planned](
    "mask/lists_bytes",
    lambda call: call.bytes > _MAX_LISTS_BYTES,
    f"lists of tiles of {{bytes:,}} bytes; at most {_MAX_LISTS_BYTES:,} are made",
    lambda call: _remedy(call.spec),
    facts=lambda call: {"bytes": call.bytes},
)


def _remedy(spec: AttentionSpec) -> str:
    if spec.is_packed and spec.meaning.same_lengths:
        return "pass the length of the longest sequence: lists need not be longer"
    return "pass a window that holds the mask: lists need not be longer"


def not_supported_reasons(spec: AttentionSpec, tiles: PlanTiles) -> tuple[Reason, ...]:
    """Every reason why a call has no plan."""
    reasons = mask_data.not_supported_reasons(spec)
    return reasons or broken((_LISTS,), _Planned(spec, tiles))
