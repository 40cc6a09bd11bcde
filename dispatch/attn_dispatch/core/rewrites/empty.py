"""A call without scores: its results are constants, and no kernel runs."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, changed


@dataclass(frozen=True)
class NoScores:
    name: str = "an axis of length zero: constants, and no kernel"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The same call with axes of 1: what else speaks against it is still said."""
        if not spec.is_empty:
            return None
        arrays = {x.name: (tuple(max(size, 1) for size in x.shape), x.dtype) for x in spec.operands}
        return changed(spec, arrays=arrays)

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        return calls.xla(spec, operands)
