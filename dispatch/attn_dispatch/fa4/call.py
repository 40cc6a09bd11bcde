"""The compiled kernels that run a call, and the tiles in which they take its mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch.fa4.score_variant import ScoreChange, ScoreVariant, variant_of
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.semantics.interval_plan import PlanTiles
from attn_dispatch.semantics.tile_lists import TileSizes


def kernels_for(spec: AttentionSpec, library: CompiledLibrary) -> KernelSet | None:
    """The narrowest kernels that hold the call's columns, and change scores as it says; None if
    none do."""
    change = score_change(spec)
    if isinstance(change, Unsupported):
        return None
    return _narrowest(spec, library, "" if change is None else change.digest)


def plain_kernels_for(spec: AttentionSpec, library: CompiledLibrary) -> KernelSet | None:
    """The kernels that would run the call if it did not change scores."""
    return _narrowest(spec, library, "")


def _narrowest(spec: AttentionSpec, library: CompiledLibrary, variant: str) -> KernelSet | None:
    is_grouped = spec.num_heads != spec.num_kv_heads
    return library.set_for(
        spec.head_dim,
        spec.head_dim_v,
        spec.dtype,
        variant=variant,
        has_grouped_gradients=spec.is_backward and is_grouped,
    )


def score_change(spec: AttentionSpec) -> ScoreVariant | Unsupported | None:
    """The code of the call's change of scores, or why there is none; None if it has no change."""
    meaning = spec.meaning
    change = ScoreChange(
        meaning.logits_soft_cap, meaning.score_mod, has_slopes=spec.has("alibi_slopes")
    )
    try:
        return variant_of(change) if change.is_any else None
    except Unsupported as error:
        return error


def tiles_of(kernels: KernelSet) -> PlanTiles:
    """The tiles that the kernels' lists name."""
    return PlanTiles(TileSizes(*kernels.forward_tiles), TileSizes(*kernels.backward_tiles))


@dataclass(frozen=True)
class KernelCall:
    """A call, and the kernels that were compiled."""

    spec: AttentionSpec
    library: CompiledLibrary

    def facts(self, is_for_it: Callable[[KernelSet], bool]) -> dict[str, object]:
        """The facts of a reason: the call's head dims and dtype, and those of the sets that are
        for such calls."""
        return {
            "compiled": compiled.names(filter(is_for_it, self.library.sets)) or "no head dims",
            "width": self.spec.head_dim,
            "width_v": self.spec.head_dim_v,
            "dtype": self.spec.dtype,
        }

    def remedy(self, widest: Mapping[str, int]) -> str:
        """The command that compiles kernels for the call's head dims; "" if build-fa4 has none.

        Args:
          widest: the most columns of the sets that build-fa4 compiles, for each architecture.
        """
        archs = {x.arch for x in self.library.sets}
        if len(archs) != 1:  # the library is not narrowed to that of a device that it is for
            return ""
        (arch,) = archs
        fits = max(self.spec.head_dim, self.spec.head_dim_v) <= widest.get(arch, 0)
        return f"run {compiled.build_command(arch)}" if fits else ""
