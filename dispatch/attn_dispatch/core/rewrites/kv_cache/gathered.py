"""Gathering keys and values from pages into arrays, for kernels that do not read pages."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import PAGES, Calls, NamedArrays, Rewrite
from attn_dispatch.semantics.pages import gathered, gathered_spec


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    return calls.kernel(gathered(spec, operands))


PAGES_GATHERED = Rewrite(
    "pages: gathered into arrays, which copies every key that the table has room for",
    gathered_spec,
    _compute,
    asked_of=PAGES,
    adds=("key", "value"),
)
