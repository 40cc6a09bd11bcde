"""The compiled kernels that run a call, and the tiles in which they take its mask."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch.semantics.interval_plan import PlanTiles
from attn_dispatch.semantics.tile_lists import TileSizes


def kernels_for(spec: AttentionSpec, library: CompiledLibrary) -> KernelSet | None:
    """The narrowest kernels that hold the call's columns; None if none do."""
    is_grouped = spec.num_heads != spec.num_kv_heads
    return library.set_for(
        spec.head_dim,
        spec.head_dim_v,
        spec.dtype,
        has_grouped_gradients=spec.is_backward and is_grouped,
    )


def tiles_of(kernels: KernelSet) -> PlanTiles:
    """The tiles that the kernels' lists name."""
    return PlanTiles(TileSizes(*kernels.forward_tiles), TileSizes(*kernels.backward_tiles))
