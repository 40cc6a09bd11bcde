"""Ready-made mods for `dot_product_attention` and `ragged_dot_product_attention`.

Each function here returns a mod, to be passed as `score_mod` or `mask_mod`:

    dot_product_attention(q, k, v, score_mod=mods.relative_position(table))

Arrays given to these functions may be traced under `jax.jit`, and the call differentiates floating
ones. b, n, t and s are those of `dot_product_attention`: the batch dims as one, the query head, and
the positions of query and key inside the sequence or segment. Both positions count from 0, whatever
`causal_alignment` is; for queries behind a cache, `with_query_offset` moves them to their place.
"""

from typing import TYPE_CHECKING, Never

from attn_dispatch.choices import missing
from attn_dispatch.mods.combining import all_of, any_of, not_, with_query_offset
from attn_dispatch.mods.masks import (
    chunked_window,
    dilated_window,
    document_mask,
    neighborhood_2d,
    prefix_lm,
    tree_mask,
)
from attn_dispatch.mods.prefixes import shared_prefix
from attn_dispatch.mods.scores import alibi, relative_position, soft_cap

__all__ = [
    "alibi",
    "all_of",
    "any_of",
    "chunked_window",
    "dilated_window",
    "document_mask",
    "neighborhood_2d",
    "not_",
    "prefix_lm",
    "relative_position",
    "shared_prefix",
    "soft_cap",
    "tree_mask",
    "with_query_offset",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the module

    def __getattr__(name: str) -> Never:
        raise missing(__name__, name, __all__)
