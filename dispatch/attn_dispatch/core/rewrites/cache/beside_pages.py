"""Rewrites that are taken beside pages because whole pages can be read after them.

ALiBi and a score_mod stand in the way of whole pages (whole_pages.py). What they are, a soft cap or
something that is added, does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.cache.whole_pages import WholePages
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, Rewrite


@dataclass(frozen=True)
class BesidePages:
    """Another one, where calls on pages would have all keys gathered else."""

    rewrite: Rewrite

    @property
    def name(self) -> str:
        return self.rewrite.name

    @property
    def moves_dropout(self) -> bool:
        return self.rewrite.moves_dropout

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        return None if self.leads_to(spec) is None else self.rewrite.inner(spec)

    def leads_to(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The call on whole pages."""
        inner = self.rewrite.inner(spec) if spec.is_paged else None
        return None if inner is None else WholePages().inner(inner)

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        return self.rewrite.compute(spec, operands, calls)
