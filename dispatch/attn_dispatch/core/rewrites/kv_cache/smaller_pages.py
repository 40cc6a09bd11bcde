"""Pages whose size is no power of two, cut without a copy into smaller ones whose size is one."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.kv_cache.blocks import Blocks
from attn_dispatch.core.rewrites.rewrite import PAGES, Calls, NamedArrays, Rewrite, changed, for_
from attn_dispatch.semantics.invalid_values import nan_where_invalid


def _when(spec: AttentionSpec) -> bool:
    if spec.promises.whole_pages or spec.page_size.bit_count() == 1 or spec.is_empty:
        return False
    return Blocks.of(spec) is not None


def _blocks(spec: AttentionSpec) -> Blocks:
    blocks = Blocks.of(spec)
    assert blocks is not None
    return blocks


def _inner(spec: AttentionSpec) -> AttentionSpec:
    blocks = _blocks(spec)
    sizes = blocks.sizes(blocks.columns)
    return changed(spec, sizes=sizes, meaning=blocks.meaning(spec))


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    blocks = _blocks(spec)
    table = {"page_table": blocks.table(spec, operands)}
    given = {**operands, **blocks.pools(spec, operands), **table}
    results = calls.kernel(for_(inner, given))
    # The inner call's table has only valid pages. Invalid ones show in the table of this call.
    return nan_where_invalid(spec, operands, results)


SMALLER_PAGES = Rewrite(
    "pages: cut into smaller ones, of a power of two",
    _inner,
    _compute,
    asked_of=PAGES,
    when=_when,
    needed_for="cache/page_of_24_t4",
)
