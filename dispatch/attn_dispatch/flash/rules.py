"""What FlashAttention's kernels do not run, every reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash.call import (
    band_from_the_end,
    call_of,
    has_ranges,
    head_dim,
    offsets_count,
)
from attn_dispatch.flash.generations import THREE, Generation
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.common_rules import DTYPE, EMPTY, MAX_SEGMENTS
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


@dataclass(frozen=True)
class _Asked:
    """A call on a device of this arch, and the kernels that are asked for it."""

    spec: AttentionSpec
    generation: Generation
    arch: str

    @property
    def has_unknown_sequences(self) -> bool:
        """Refused for want of max_segments."""
        return is_packed(self.spec) and most_sequences(self.spec) is None

    @property
    def widest(self) -> int:
        return self.generation.widest_on(self.arch, is_backward=self.spec.is_backward)

    @property
    def blocks(self) -> tuple[int, str] | None:
        """Of a launch grid's axis, with what it is of; None where it is not limited."""
        spec, forward = self.spec, self.generation.blocks_limit_forward
        if forward and has_ranges(spec):
            if self.has_unknown_sequences:
                return None
            return (
                offsets_count(call_of(spec, self.generation)) - 1,
                "sequences, gaps among them,",
            )
        if not forward and (has_ranges(spec) or not spec.is_backward):
            return None
        return spec.batch, "batch"


def not_supported_reasons(
    spec: AttentionSpec, package: str, generation: Generation = THREE, arch: str = ""
) -> tuple[Reason, ...]:
    """Of a call on a device of that arch that runs some, with the kernels of this package."""
    unknown = unknown_features(spec, FEATURES, f"{package}'s kernels have none")
    asked = _Asked(spec, generation, arch)
    return (
        *unknown,
        *broken((DTYPE, _MAX_SEGMENTS), spec),
        *broken(_RULES, asked),
        *broken((_SCALE, EMPTY, *_WRONG_CORNER), spec),
    )


_MAX_SEGMENTS = replace(MAX_SEGMENTS, applies=lambda s: is_packed(s) and most_sequences(s) is None)

_SCALE = Rule[AttentionSpec](
    "flash/scale",
    is_out_of_range,
    "scale: kernels multiply by it in float32, where it is no normal number",
    "multiply query by the scale, and pass scale=1",
)


def _width(asked: _Asked) -> dict[str, Any]:
    spec, widest = asked.spec, asked.widest
    is_less = widest < asked.generation.widest
    return {
        "widest": widest,
        "where": f" in the backward pass on {asked.arch}" if is_less else "",
        "width": head_dim(spec),
        "lse": ", those for the gradient of lse included" if spec.has("lse_grad") else "",
    }


def _too_many_blocks(asked: _Asked) -> bool:
    """Whether a launch grid cannot have an axis as long."""
    if asked.blocks is None or asked.spec.is_empty:
        return False
    return max(asked.blocks[0], asked.spec.num_heads) > _MOST_BLOCKS


def _blocks(asked: _Asked) -> dict[str, Any]:
    assert asked.blocks is not None
    number, what = asked.blocks
    forward = asked.generation.blocks_limit_forward
    where = "" if forward else " in the backward pass"
    return {"what": what, "where": where, "number": number, "heads": asked.spec.num_heads}


def _lies_apart(asked: _Asked) -> bool:
    """Whether batch rows of a packed call lie a tile apart in one array."""
    return has_ranges(asked.spec) and asked.spec.batch > 1


def _shortest(spec: AttentionSpec) -> int:
    return min(spec.seq_len_q, spec.seq_len_kv)


def _has_wide_gaps(asked: _Asked) -> bool:
    spec, gaps = asked.spec, asked.spec.batch * asked.generation.tile
    return _lies_apart(asked) and gaps > max(_MOST_GAPS, spec.batch * _shortest(spec))


def _has_many_rows(asked: _Asked) -> bool:
    spec = asked.spec
    rows = spec.batch * (max(spec.seq_len_q, spec.seq_len_kv) + asked.generation.tile)
    return _lies_apart(asked) and rows >= 2**31


_RULES = (
    Rule[_Asked](
        "flash/head_dim",
        lambda a: head_dim(a.spec) > a.widest,
        "head dims up to {widest}{where}, got {width} columns{lse}",
        facts=_width,
    ),
    Rule[_Asked](
        "flash/blocks",
        _too_many_blocks,
        f"{{what}} and heads up to {_MOST_BLOCKS:,} each{{where}}, got {{number:,}} and "
        "{heads:,}",
        facts=_blocks,
    ),
    Rule[_Asked](
        "flash/gaps",
        _has_wide_gaps,
        "lengths and packed sequences of {batch:,} batch rows, of {shortest} queries or keys: they "
        "would have to lie {tile} rows apart",
        facts=lambda a: {
            "batch": a.spec.batch,
            "shortest": _shortest(a.spec),
            "tile": a.generation.tile,
        },
    ),
    Rule[_Asked](
        "flash/int32_rows",
        _has_many_rows,
        "packed sequences of 2^31 rows and more, past 32-bit offsets",
    ),
)


def _counts_from_top_left(spec: AttentionSpec) -> bool:
    """Whether a band is counted from the other corner than kernels count from."""
    return spec.band != (None, None) and spec.meaning.causal_alignment != "bottom_right"


_WRONG_CORNER = (
    Rule[AttentionSpec](
        "flash/top_left_of_sequences",
        lambda s: _counts_from_top_left(s) and has_ranges(s) and not s.meaning.same_lengths,
        "causality and windows from the top left: kernels count from the last query and key of "
        "a sequence, which is the same only where it has as many keys as queries",
    ),
    Rule[AttentionSpec](
        "flash/top_left",
        lambda s: (
            _counts_from_top_left(s)
            and not has_ranges(s)
            and not all(side is None or side >= 0 for side in band_from_the_end(s))
        ),
        "causality and windows from the top left with {queries} queries and {keys} keys: kernels "
        "count from the last of both, and no side of a window may be below 0",
        facts=lambda s: {"queries": s.seq_len_q, "keys": s.seq_len_kv},
    ),
)
