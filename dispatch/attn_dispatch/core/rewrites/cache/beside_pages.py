"""Rewrites that are taken beside pages because whole pages can be read after them.

ALiBi and a score_mod stand in the way of whole pages (whole_pages.py). A soft cap or a bias, which
they are rewritten as, does not.
"""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.dense import SLOPES_AS_BIAS
from attn_dispatch.core.rewrites.mods_as_arguments import SCORE_MOD_AS_CAP
from attn_dispatch.core.rewrites.mods_as_arrays import SUM_AS_BIAS
from attn_dispatch.core.rewrites.rewrite import PAGES, Rewrite


def _for_whole_pages(rewrite: Rewrite) -> Rewrite:
    """The rewrite, of calls on pages of which a kernel would have all keys gathered otherwise."""
    (operand,) = rewrite.asked_of.operands

    def when(spec: AttentionSpec) -> bool:
        return spec.has(operand) and rewrite.when(spec)

    return replace(
        rewrite,
        asked_of=PAGES,
        when=when,
        enables=WHOLE_PAGES,
    )


BESIDE_PAGES = tuple(map(_for_whole_pages, (SCORE_MOD_AS_CAP, SUM_AS_BIAS, SLOPES_AS_BIAS)))
