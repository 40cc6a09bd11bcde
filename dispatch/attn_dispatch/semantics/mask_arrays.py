"""The arrays that kernels read of a mask, and those that clear what padding may hold.

They depend on nothing that changes from layer to layer: core/mask_arrays.py makes them once for all
layers, if the mask is intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics import mask_data
from attn_dispatch.semantics.given_ids import pick
from attn_dispatch.semantics.interval_plan import band_of, grid_of
from attn_dispatch.semantics.invalid_values import invalid_queries, may_be_invalid
from attn_dispatch.semantics.mask_bits import seen_keys
from attn_dispatch.semantics.real_rows import real_rows_by_position
from attn_dispatch.semantics.segment_runs import SegmentRuns
from attn_dispatch.semantics.tile_lists import TileLists, TileSizes


@dataclass(frozen=True)
class MaskRows:
    """What a call's queries and keys see; the same in both directions."""

    mask: jax.Array
    """Intervals or bits, as in mask_data.py."""
    real_keys: jax.Array | None
    """bool [1|B, 1, S]: the key belongs to a sequence that has queries; None if all do."""
    invalid: jax.Array | None
    """bool [B, 1|T], as of `invalid_queries`."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> MaskRows:
        """The rows of a call for which `mask_data.not_supported_reasons` is empty."""
        mask = mask_data.mask_data(spec, operands)
        if spec.has("query_segment_ids") and spec.meaning.max_segments is None:
            keys = seen_keys(mask, spec.seq_len_kv)
            return MaskRows(mask, keys[:, None], invalid_queries(spec, operands))
        return MaskRows(mask, *real_and_invalid(spec, operands))

    @staticmethod
    def from_arrays(spec: AttentionSpec, arrays: Sequence[jax.Array]) -> MaskRows:
        """The rows of a call from their `arrays`."""
        mask, *others = arrays
        real_keys = others.pop(0) if spec.has_runtime_lengths else None
        (invalid,) = others if may_be_invalid(spec) else (None,)
        return MaskRows(mask, real_keys, invalid)

    @staticmethod
    def number_of_flags(spec: AttentionSpec) -> int:
        """How many arrays of a call's rows are there beside the mask."""
        return int(spec.has_runtime_lengths) + int(may_be_invalid(spec))

    @property
    def arrays(self) -> list[jax.Array]:
        """The mask and the flags that are not None."""
        return [x for x in (self.mask, self.real_keys, self.invalid) if x is not None]

    @property
    def attends(self) -> jax.Array:
        """bool [1|B, 1|N, T]: the query sees some key."""
        return mask_data.attends(self.mask)


def real_and_invalid(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """`real_keys` and `invalid` of a call's rows. Segment ids need max_segments."""
    if not spec.has("query_segment_ids"):
        _, keys = real_rows_by_position(spec, operands)
        return None if keys is None else keys[:, None], invalid_queries(spec, operands)
    runs = SegmentRuns.of(spec, operands)
    keys = (runs.ids.key > 0) & (pick(runs.lengths[0], runs.ids.key) > 0)
    return keys[:, None], runs.ids.invalid if may_be_invalid(spec) else None


@dataclass(frozen=True)
class MaskArrays:
    """The arrays for one direction of a call."""

    rows: MaskRows
    lists: TileLists
    tile: TileSizes
    """The tiles that the lists name."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array], tile: TileSizes) -> MaskArrays:
        """The arrays of a call for which `interval_plan.not_supported_reasons` is empty."""
        rows, grid, ends = MaskRows.of(spec, operands), grid_of(spec, tile), band_of(spec).ends
        lists = mask_data.mask_lists(rows.mask, grid, ends, is_backward=spec.is_backward)
        return MaskArrays(rows, lists, tile)
