"""The list of rewrites, and the choice of those that are preferred even without a reason.

The cheapest come first, and a rewrite precedes every rewrite that needs its output.
"""

from __future__ import annotations

from functools import cache

from attn_dispatch.core.rewrites.as_mask_or_bias import (
    BAND_AS_MASK,
    MASK_AS_BIAS,
    SEQUENCES_AS_MASK,
    SLOPES_AS_BIAS,
)
from attn_dispatch.core.rewrites.dropout_keys import CALL_FOR_EACH_KEY
from attn_dispatch.core.rewrites.empty import NO_SCORES
from attn_dispatch.core.rewrites.in_parts import in_parts_of
from attn_dispatch.core.rewrites.kv_cache.beside_pages import BESIDE_PAGES
from attn_dispatch.core.rewrites.kv_cache.few_queries import QUERIES_AS_HEADS
from attn_dispatch.core.rewrites.kv_cache.gathered import PAGES_GATHERED
from attn_dispatch.core.rewrites.kv_cache.grouped_heads import HEADS_AS_QUERIES
from attn_dispatch.core.rewrites.kv_cache.near_keys import NEAR_KEYS
from attn_dispatch.core.rewrites.kv_cache.smaller_pages import SMALLER_PAGES
from attn_dispatch.core.rewrites.kv_cache.whole_pages import WHOLE_PAGES
from attn_dispatch.core.rewrites.mask_as_lengths import MASK_MOD_AS_LENGTHS
from attn_dispatch.core.rewrites.mask_from_out import MASK_FROM_OUT
from attn_dispatch.core.rewrites.mods_as_arguments import SCORE_MOD_AS_CAP, SCORE_MOD_AS_SLOPES
from attn_dispatch.core.rewrites.mods_as_arrays import MASK_MOD_AS_MASK, SUM_AS_BIAS
from attn_dispatch.core.rewrites.narrow_bias import NARROW_BIAS
from attn_dispatch.core.rewrites.offset_as_lengths import (
    OFFSET_AS_LENGTHS,
    OFFSET_AS_LENGTHS_OR_XLA,
)
from attn_dispatch.core.rewrites.one_diagonal import ONE_DIAGONAL
from attn_dispatch.core.rewrites.packed_as_padded import PACKED_AS_PADDED
from attn_dispatch.core.rewrites.results_by_xla import (
    ALIBI_GRADIENT_BY_XLA,
    BIAS_GRADIENT_BY_XLA,
    MAXIMUM_BY_XLA,
    MOD_GRADIENTS_BY_XLA,
)
from attn_dispatch.core.rewrites.rewrite import Rewrite
from attn_dispatch.core.rewrites.row_bias import ROW_BIAS
from attn_dispatch.core.rewrites.sinks import SINKS_AFTER_A_CACHE, SINKS_AFTERWARDS
from attn_dispatch.core.rewrites.static_offset import NOTHING_SEEN, STATIC_OFFSET
from attn_dispatch.core.rewrites.value_columns import VALUES_OF_128, VALUES_OF_256
from attn_dispatch.core.rewrites.wide_heads import HEADS_OF_256, VALUE_AS_WIDE

_OF_A_CACHE = (NEAR_KEYS, WHOLE_PAGES, HEADS_AS_QUERIES, QUERIES_AS_HEADS)

OF_OFFSETS = (NOTHING_SEEN, STATIC_OFFSET, OFFSET_AS_LENGTHS, OFFSET_AS_LENGTHS_OR_XLA)

REWRITES: tuple[Rewrite, ...] = (
    *OF_OFFSETS,
    MASK_MOD_AS_LENGTHS,
    ONE_DIAGONAL,
    NARROW_BIAS,
    NO_SCORES,
    CALL_FOR_EACH_KEY,
    MASK_FROM_OUT,
    SCORE_MOD_AS_CAP,
    SCORE_MOD_AS_SLOPES,
    ALIBI_GRADIENT_BY_XLA,
    SUM_AS_BIAS,
    BIAS_GRADIENT_BY_XLA,
    MOD_GRADIENTS_BY_XLA,
    ROW_BIAS,
    SINKS_AFTERWARDS,
    *_OF_A_CACHE,
    SMALLER_PAGES,
    PAGES_GATHERED,
    MAXIMUM_BY_XLA,
    SLOPES_AS_BIAS,
    BAND_AS_MASK,
    PACKED_AS_PADDED,
    SEQUENCES_AS_MASK,
    MASK_MOD_AS_MASK,
    MASK_AS_BIAS,
    HEADS_OF_256,
    VALUE_AS_WIDE,
    VALUES_OF_256,
    VALUES_OF_128,
)

ONE_BY_ONE = (in_parts_of("batch", 1), in_parts_of("heads", 1))
"""Rewrites that `Settings.first_rewrite` may also name. Other sizes are chosen for each call."""

FOR_DECODING = (SINKS_AFTER_A_CACHE, *BESIDE_PAGES, *_OF_A_CACHE)
"""Rewrites after which kernels made for decoding can run a call on a cache."""


@cache
def preferred(
    names: tuple[str, ...],
    *,
    is_backward: bool,
    has_decoding_kernel: bool,
    skips_from_bottom_right: bool,
    has_refused_offset: bool = False,
) -> tuple[Rewrite, ...]:
    """The rewrites to take even if the call breaks no rule, because kernels then do less work.

    Args:
      names: the call's operands.
      is_backward: whether it is a backward call.
      has_decoding_kernel: whether the implementation has a kernel for single queries on a cache.
      skips_from_bottom_right: whether the implementation's backward pass skips the keys left of a
        window that is counted from the bottom right.
      has_refused_offset: whether causal_alignment is a number, and the implementation takes none.
        Other rewrites may then apply to the call without it.
    """
    rewrites = (
        *(OF_OFFSETS if has_refused_offset else ()),
        MASK_MOD_AS_LENGTHS,
        *(() if skips_from_bottom_right else (ONE_DIAGONAL,)),
        *(FOR_DECODING if has_decoding_kernel else ()),
    )
    found: list[Rewrite] = []
    known = set(names)
    for rewrite in rewrites:
        if rewrite.asked_of.includes(known, is_backward=is_backward):
            found.append(rewrite)
            known.update(rewrite.adds)
    return tuple(found)
