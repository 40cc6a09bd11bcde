"""Keys and values in pages gathered into arrays, for kernels that do not read pages."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls
from attn_dispatch.semantics.pages import gathered, gathered_spec


@dataclass(frozen=True)
class PagesGathered:
    name: str = "pages: gathered into arrays, which copies every key that the table has room for"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        return gathered_spec(spec) if spec.is_paged else None

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        return calls.kernel(gathered_spec(spec), gathered(spec, operands))
