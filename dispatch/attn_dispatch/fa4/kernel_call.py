"""A call beside the kernels that were compiled: what rules on its head dims and dtype read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet


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
