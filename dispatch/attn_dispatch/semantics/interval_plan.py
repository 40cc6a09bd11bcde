"""The tiles in which kernels take a call's mask, and the size of their lists."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import mask_data
from attn_dispatch.semantics.diagonal import KeyBand
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch.semantics.tile_lists import TileGrid, TileSizes

_MAX_LISTS_BYTES = 2**28
"""The most bytes of the lists of one direction. Without a band, 262,144 queries and keys have lists
of 2^25 bytes in tiles of 128."""


@dataclass(frozen=True)
class PlanTiles:
    """The tiles of both directions."""

    forward: TileSizes
    backward: TileSizes
    """The queries of a tile are those that an entry of a backward list stands for."""


def lists_bytes(spec: AttentionSpec, tiles: PlanTiles) -> tuple[int, int]:
    """Bytes of the forward and of the backward lists, if every batch row has its own."""
    forward, backward = grid_of(spec, tiles.forward), grid_of(spec, tiles.backward)
    masks = mask_data.masks_of_lists(spec)
    return forward.forward_bytes(masks), backward.backward_bytes(masks)


def grid_of(spec: AttentionSpec, tile: TileSizes) -> TileGrid:
    """The tiles of a call in one direction."""
    return TileGrid.of(spec.seq_len_q, spec.seq_len_kv, tile, band_of(spec))


def band_of(spec: AttentionSpec) -> KeyBand:
    """A band that holds the intervals of a call; open for bits."""
    return KeyBand.of(spec) if has_intervals(spec) else KeyBand()


@dataclass(frozen=True)
class _TiledCall:
    spec: AttentionSpec
    tiles: PlanTiles

    @property
    def bytes(self) -> int:
        """Bytes of the lists of the direction that the spec has."""
        return lists_bytes(self.spec, self.tiles)[int(self.spec.is_backward)]


_LISTS = Rule[_TiledCall](
    "mask/lists_bytes",
    lambda call: call.bytes > _MAX_LISTS_BYTES,
    f"lists of tiles of {{bytes:,}} bytes; at most {_MAX_LISTS_BYTES:,} are made",
    lambda call: _remedy(call.spec),
    facts=lambda call: {"bytes": call.bytes},
)


def _remedy(spec: AttentionSpec) -> str:
    if spec.is_packed and spec.meaning.same_lengths:
        named = "max_segment_len, " if spec.has("query_segment_ids") else ""
        return f"pass {named}the length of the longest sequence: lists need not be longer"
    return "pass a window that holds the mask: lists need not be longer"


def not_supported_reasons(spec: AttentionSpec, tiles: PlanTiles) -> tuple[Reason, ...]:
    """Every reason why a call has no plan."""
    reasons = mask_data.not_supported_reasons(spec)
    return reasons or broken((_LISTS,), _TiledCall(spec, tiles))
