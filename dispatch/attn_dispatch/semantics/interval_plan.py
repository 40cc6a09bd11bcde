"""What a kernel needs to skip the unseen tiles of a call: its intervals and its lists of tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import interval_rules
from attn_dispatch.semantics.intervals import Intervals
from attn_dispatch.semantics.key_bands import KeyBand
from attn_dispatch.semantics.tile_lists import (
    TileGrid,
    TileLists,
    TileSizes,
    backward_lists,
    forward_lists,
)

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
    """The intervals of a call's mask and, made when they are asked for, its lists of tiles.

    Everything is made of small integer arrays by XLA, wherever it is asked for. It depends on
    nothing that changes from layer to layer: core/mask_arrays.py makes it once for all of them.
    """

    intervals: Intervals
    grids: tuple[TileGrid, TileGrid]
    """The tiles of the forward and of the backward pass."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array], tiles: PlanTiles) -> MaskPlan:
        """The plan of a call for which `not_supported_reasons` is empty."""
        return MaskPlan(Intervals.of(spec, operands), plan_grids(spec, tiles))

    @property
    def rows(self) -> jax.Array:
        """int32 [1|B, T, 4], as in `Intervals`."""
        return self.intervals.rows

    @cached_property
    def forward(self) -> TileLists:
        """For each tile of queries, its tiles of keys."""
        return forward_lists(self.rows, self.grids[0])

    @cached_property
    def backward(self) -> TileLists:
        """For each tile of keys, its tiles of queries."""
        return backward_lists(self.rows, self.grids[1])


def lists_bytes(spec: AttentionSpec, tiles: PlanTiles) -> tuple[int, int]:
    """Bytes of the forward and of the backward lists, if every batch row has its own."""
    forward, backward = plan_grids(spec, tiles)
    batch = spec.batch if isinstance(spec.batch, int) else 1
    return forward.forward_bytes(batch), backward.backward_bytes(batch)


def plan_grids(spec: AttentionSpec, tiles: PlanTiles) -> tuple[TileGrid, TileGrid]:
    """The tiles of the forward and of the backward pass."""
    band = KeyBand.of(spec)
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
    "intervals/lists_bytes",
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
    reasons = interval_rules.not_supported_reasons(spec)
    has_lengths = not (spec.is_paged or spec.has_symbolic_length or spec.is_empty)
    return reasons + (broken((_LISTS,), _Planned(spec, tiles)) if has_lengths else ())
