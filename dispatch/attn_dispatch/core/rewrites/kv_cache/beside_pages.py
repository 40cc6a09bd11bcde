"""Rewrites of calls on pages whose only purpose is to make the rewrite of whole_pages.py possible.

That rewrite applies neither to ALiBi nor to a score_mod. It applies to the soft cap or the bias
that these rewrites replace them by.
"""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.as_mask_or_bias import SLOPES_AS_BIAS
from attn_dispatch.core.rewrites.kv_cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.mods_as_arguments import SCORE_MOD_AS_CAP
from attn_dispatch.core.rewrites.mods_as_arrays import SUM_AS_BIAS
from attn_dispatch.core.rewrites.rewrite import PAGES, Rewrite


def _for_whole_pages(rewrite: Rewrite) -> Rewrite:
    """The rewrite, limited to calls on pages, and to those to which WHOLE_PAGES applies next.

    Without these limits the rewrite would also be taken where all keys are then gathered.
    """
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
