"""Pages of a size that is no power of two, as smaller ones of a size that is: nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.cache.blocks import Blocks
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, changed, for_
from attn_dispatch.semantics.invalid_values import nan_where_invalid


@dataclass(frozen=True)
class SmallerPages:
    name: str = "pages: cut into smaller ones, of a power of two"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        if not spec.is_paged or spec.promises.whole_pages or spec.page_size.bit_count() == 1:
            return None
        if spec.is_empty or (blocks := Blocks.of(spec)) is None:
            return None
        arrays = blocks.arrays(spec, blocks.columns)
        return changed(spec, arrays=arrays, meaning=blocks.meaning(spec))

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner, blocks = self.inner(spec), Blocks.of(spec)
        assert inner is not None and blocks is not None
        table = {"page_table": blocks.table(spec, operands)}
        given = {**operands, **blocks.pools(spec, operands), **table}
        results = calls.kernel(inner, for_(inner, given))
        # Its own pages are all there: which are not, the table of the call itself says.
        return nan_where_invalid(spec, operands, results)
