"""What FlashAttention's kernels do not run, every reason."""

from __future__ import annotations

from attn_dispatch.call.features import features_of
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash.call import (
    band_from_the_end,
    call_of,
    has_ranges,
    head_dim,
    offsets_count,
)
from attn_dispatch.flash.generations import THREE, Generation
from attn_dispatch.semantics.row_ids import is_packed, most_sequences
from attn_dispatch.semantics.scaled_query import is_out_of_range

FEATURES = (
    "causality and windows",
    "lengths",
    "segment ids",
    "cu_seqlens",
    "the gradient of lse",
)
_MOST_BLOCKS = 65535
"""Of a launch grid's second and third axes. Beyond, FlashAttention-3's backward pass says nothing
and gradients are garbage (dew-flash-attn 0.3.6, H200); its forward and packed kernels count
otherwise."""

_MOST_GAPS = 2**16
"""Rows between batch rows that are few enough however short those are."""


def not_supported_reasons(
    spec: AttentionSpec, package: str, generation: Generation = THREE, arch: str = ""
) -> tuple[str, ...]:
    """Of a call on a device of that arch that runs some, with the kernels of this package."""
    unknown = (x for x in features_of(spec) if x not in FEATURES)
    reasons = [f"{x}: {package}'s kernels have none" for x in unknown]
    if spec.dtype not in ("float16", "bfloat16"):
        reasons.append(f"needs float16 or bfloat16, got {spec.dtype}")
    if is_packed(spec) and most_sequences(spec) is None:
        reasons.append("segment ids: pass max_segments, the largest id")
    widest = generation.widest_on(arch, is_backward=spec.is_backward)
    if (width := head_dim(spec)) > widest:
        lse = ", those for the gradient of lse included" if spec.has("lse_grad") else ""
        where = f" in the backward pass on {arch}" if widest < generation.widest else ""
        reasons.append(f"head dims up to {widest}{where}, got {width} columns{lse}")
    reasons += [*_too_many_blocks(spec, generation), *_too_many_rows(spec, generation.tile)]
    if is_out_of_range(spec):
        reasons.append("scale: kernels multiply by it in float32, where it is no normal number")
    if spec.is_empty or 0 in (spec.head_dim, spec.head_dim_v):
        reasons.append("an axis has length zero, so there is nothing to compute")
    return (*reasons, *_wrong_corner(spec))


def _too_many_blocks(spec: AttentionSpec, generation: Generation) -> list[str]:
    """Why a launch grid cannot have an axis as long."""
    batch, named = spec.batch, "batch"
    if generation.blocks_limit_forward and has_ranges(spec):
        if is_packed(spec) and most_sequences(spec) is None:
            return []  # refused for that
        batch, named = offsets_count(call_of(spec, generation)) - 1, "sequences, gaps among them,"
    elif not generation.blocks_limit_forward and (has_ranges(spec) or not spec.is_backward):
        return []
    if max(batch, spec.num_heads) <= _MOST_BLOCKS or spec.is_empty:
        return []
    where = "" if generation.blocks_limit_forward else " in the backward pass"
    return [
        f"{named} and heads up to {_MOST_BLOCKS:,} each{where}, got {batch:,} and "
        f"{spec.num_heads:,}"
    ]


def _too_many_rows(spec: AttentionSpec, tile: int) -> list[str]:
    """Why the batch rows of a packed call cannot lie a tile apart in one array."""
    if not has_ranges(spec) or spec.batch == 1:
        return []
    reasons = []
    gaps, shortest = spec.batch * tile, min(spec.seq_len_q, spec.seq_len_kv)
    if gaps > max(_MOST_GAPS, spec.batch * shortest):
        reasons.append(
            f"lengths and packed sequences of {spec.batch:,} batch rows, of {shortest} queries or "
            f"keys: they would have to lie {tile} rows apart"
        )
    if spec.batch * (max(spec.seq_len_q, spec.seq_len_kv) + tile) >= 2**31:
        reasons.append("packed sequences of 2^31 rows and more, past 32-bit offsets")
    return reasons


def _wrong_corner(spec: AttentionSpec) -> tuple[str, ...]:
    """Why causality or a window cannot be counted from the last query and key."""
    if spec.band == (None, None) or spec.options.causal_alignment == "bottom_right":
        return ()
    if has_ranges(spec):
        if spec.options.same_lengths:
            return ()
        return (
            "causality and windows from the top left: kernels count from the last query and key of "
            "a sequence, which is the same only where it has as many keys as queries",
        )
    if all(side is None or side >= 0 for side in band_from_the_end(spec)):
        return ()
    return (
        f"causality and windows from the top left with {spec.seq_len_q} queries and "
        f"{spec.seq_len_kv} keys: kernels count from the last of both, and no side of a window "
        "may be below 0",
    )
