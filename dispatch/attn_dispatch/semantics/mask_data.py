"""The mask of a call as kernels read it: two intervals of keys for each query, or a bit a pair.

Intervals are int32 [1|B, T, 4] (intervals.py), where they are the mask whatever its arrays hold.
All other masks are bits, uint32 [1|B, 1|N, T, W] (mask_bits.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import intervals, mask_bits
from attn_dispatch.semantics.common_rules import EMPTY
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch.semantics.segment_runs import table_size
from attn_dispatch.semantics.tile_lists import (
    Ends,
    TileGrid,
    TileLists,
    backward_lists,
    forward_lists,
)

_MAX_BITS_BYTES = 2**31
"""The most bytes of bits: 131,072 queries and as many keys."""


def mask_data(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The mask of a call for which `not_supported_reasons` is empty."""
    if has_intervals(spec):
        return intervals.rows(spec, operands)
    return mask_bits.mask_bits(spec, operands)


def has_bits(mask: jax.Array) -> bool:
    """Whether a mask is one bit a pair, and not intervals."""
    return mask.dtype == jnp.uint32


def mask_lists(mask: jax.Array, grid: TileGrid, ends: Ends, *, is_backward: bool) -> TileLists:
    """The lists of tiles of one direction, from the ends of the call's band."""
    if has_bits(mask):
        return mask_bits.bit_lists(mask, grid, is_backward=is_backward)
    return (backward_lists if is_backward else forward_lists)(mask, grid, ends)


def attends(mask: jax.Array) -> jax.Array:
    """bool [1|B, 1|N, T]: the query sees some key."""
    if has_bits(mask):
        return mask_bits.attends(mask)
    return ((mask[..., 1] | mask[..., 3]) > 0)[:, None]  # lengths are not negative


def data_bytes(spec: AttentionSpec) -> int:
    """Bytes of `mask_data`, with intervals for every batch row."""
    if not has_intervals(spec):
        return mask_bits.bits_bytes(spec)
    return 16 * spec.seq_len_q * (spec.batch if isinstance(spec.batch, int) else 1)


def masks_of_lists(spec: AttentionSpec) -> int:
    """The number of masks that have lists of their own; intervals have one for every batch row."""
    batch, heads = (spec.batch, 1) if has_intervals(spec) else mask_bits.bits_shape(spec)[:2]
    return heads * (batch if isinstance(batch, int) else 1)


def _remedy(spec: AttentionSpec) -> str:
    if spec.has("mask"):
        return "describe the mask by a mask_mod, lengths or segment ids"
    if spec.has("query_segment_ids") and spec.meaning.max_segments is None:
        return "pass max_segments, the largest id that any row may hold"
    return "compare s with numbers of the query in mask_mod, the same for all heads"


_MAX_LENGTH = 2**31 - 1025
"""Places are int32, also those of a tile that reaches past the end (cuda_backend/fa4/calls.cc)."""

_SHAPES = (
    EMPTY,
    Rule[AttentionSpec](
        "mask/pages",
        lambda s: s.is_paged,
        "keys in pages: masks are those of keys in one array",
    ),
    Rule[AttentionSpec](
        "mask/symbolic_lengths",
        lambda s: s.has_symbolic_length,
        "lengths that are symbols of jax.export: the number of rows has to be known",
        "export with known lengths",
    ),
    Rule[AttentionSpec](
        "mask/length",
        lambda s: not s.has_symbolic_length and max(s.seq_len_q, s.seq_len_kv) > _MAX_LENGTH,
        f"up to {_MAX_LENGTH:,} queries and keys of a batch row, which are counted in 32 bits; got "
        "{queries:,} and {keys:,}",
        facts=lambda s: {"queries": s.seq_len_q, "keys": s.seq_len_kv},
    ),
    Rule[AttentionSpec](
        "mask/segments",
        lambda s: table_size(s) > _MAX_LENGTH,
        f"batch rows times max_segments: {{numbers:,}} numbers of ids; at most {_MAX_LENGTH:,} are "
        "counted",
        "pass a smaller max_segments",
        facts=lambda s: {"numbers": table_size(s)},
    ),
)

_BITS = Rule[AttentionSpec](
    "mask/bits_bytes",
    lambda s: not has_intervals(s) and mask_bits.bits_bytes(s) > _MAX_BITS_BYTES,
    "a mask that is not known to be two ranges of keys for each query, of {bytes:,} bytes with one "
    f"bit a pair; at most {_MAX_BITS_BYTES:,} are made",
    _remedy,
    facts=lambda s: {"bytes": mask_bits.bits_bytes(s)},
)


def not_supported_reasons(spec: AttentionSpec) -> tuple[Reason, ...]:
    """Every reason why a call's mask is not given to kernels as data."""
    return broken(_SHAPES, spec) or broken((_BITS,), spec)
