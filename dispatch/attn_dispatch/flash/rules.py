"""The calls that FlashAttention's kernels do not run, with every reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash import library
from attn_dispatch.flash.call import (
    band_from_the_end,
    call_of,
    head_dim,
    needs_packing,
    offsets_count,
)
from attn_dispatch.flash.generations import Generation
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.common_rules import DTYPE, EMPTY, MAX_SEGMENTS, scale_rule

FEATURES = (
    "causality and windows",
    "lengths",
    "segment ids",
    "cu_seqlens",
    "the gradient of lse",
)
_MAX_BLOCKS = 65535
"""The limit of a launch grid's second and third axes. Beyond it FlashAttention-3's backward pass
returns garbage without an error (dew-flash-attn 0.3.6, H200); its forward and packed kernels use
other axes."""

_MAX_GAP_ROWS = 2**16
"""So many rows of gaps between batch rows are always accepted, however short the rows are."""


@dataclass(frozen=True)
class _KernelCall:
    """A call on a device of this arch, with the kernels of this generation."""

    spec: AttentionSpec
    generation: Generation
    arch: str

    @property
    def widest(self) -> int:
        return self.generation.widest_on(self.arch, is_backward=self.spec.is_backward)

    @property
    def blocks(self) -> tuple[int, str] | None:
        """The length of a launch grid's axis, and what it counts; None where there is no limit."""
        spec, forward = self.spec, self.generation.blocks_limit_forward
        if forward and needs_packing(spec):
            if _lacks_max_segments(spec):
                return None  # which is another rule's reason
            return (
                offsets_count(call_of(spec, self.generation)) - 1,
                "sequences, gaps among them,",
            )
        if not forward and (needs_packing(spec) or not spec.is_backward):
            return None
        return spec.batch, "batch"


def not_supported_reasons(
    spec: AttentionSpec, generation: Generation, arch: str
) -> tuple[Reason, ...]:
    """Every reason against a call by the kernels of a generation on this arch."""
    unknown = unknown_features(spec, FEATURES, f"{library.NAME}'s kernels have none")
    call = _KernelCall(spec, generation, arch)
    return (
        *unknown,
        *broken((DTYPE, _MAX_SEGMENTS), spec),
        *broken(_RULES, call),
        *broken((_SCALE, EMPTY, *_WRONG_CORNER), spec),
    )


def _lacks_max_segments(spec: AttentionSpec) -> bool:
    return spec.is_packed and spec.most_sequences is None


_MAX_SEGMENTS = replace(MAX_SEGMENTS, applies=_lacks_max_segments)

_SCALE = scale_rule("flash/scale", "kernels multiply")


def _width(call: _KernelCall) -> dict[str, object]:
    spec, widest = call.spec, call.widest
    is_narrower = widest < call.generation.widest
    return {
        "widest": widest,
        "where": f" in the backward pass on {call.arch}" if is_narrower else "",
        "width": head_dim(spec),
        "lse": ", those for the gradient of lse included" if spec.has("lse_grad") else "",
    }


def _too_many_blocks(call: _KernelCall) -> bool:
    """Whether an axis of the launch grid would be too long."""
    if call.blocks is None or call.spec.is_empty:
        return False
    return max(call.blocks[0], call.spec.num_heads) > _MAX_BLOCKS


def _blocks(call: _KernelCall) -> dict[str, object]:
    assert call.blocks is not None
    number, what = call.blocks
    forward = call.generation.blocks_limit_forward
    where = "" if forward else " in the backward pass"
    return {"what": what, "where": where, "number": number, "heads": call.spec.num_heads}


def _has_gaps(call: _KernelCall) -> bool:
    """Whether the packed array has gaps of a tile between batch rows."""
    return needs_packing(call.spec) and call.spec.batch > 1


def _shortest(spec: AttentionSpec) -> int:
    return min(spec.seq_len_q, spec.seq_len_kv)


def _has_wide_gaps(call: _KernelCall) -> bool:
    spec, gaps = call.spec, call.spec.batch * call.generation.tile
    return _has_gaps(call) and gaps > max(_MAX_GAP_ROWS, spec.batch * _shortest(spec))


def _rows_with_gaps(call: _KernelCall) -> int:
    spec = call.spec
    return spec.batch * (max(spec.seq_len_q, spec.seq_len_kv) + call.generation.tile)


_RULES = (
    Rule[_KernelCall](
        "flash/head_dim",
        lambda c: head_dim(c.spec) > c.widest,
        "head dims up to {widest}{where}, got {width} columns{lse}",
        facts=_width,
    ),
    Rule[_KernelCall](
        "flash/blocks",
        _too_many_blocks,
        f"{{what}} and heads up to {_MAX_BLOCKS:,} each{{where}}, got {{number:,}} and {{heads:,}}",
        facts=_blocks,
    ),
    Rule[_KernelCall](
        "flash/gaps",
        _has_wide_gaps,
        "lengths and packed sequences of {batch:,} batch rows, of {shortest} queries or keys: they "
        "would have to lie {tile} rows apart",
        facts=lambda c: {
            "batch": c.spec.batch,
            "shortest": _shortest(c.spec),
            "tile": c.generation.tile,
        },
    ),
    Rule[_KernelCall](
        "flash/int32_rows",
        lambda c: _has_gaps(c) and _rows_with_gaps(c) >= 2**31,
        "packed sequences of {rows:,} rows, gaps among them, past 32-bit offsets",
        facts=lambda c: {"rows": _rows_with_gaps(c)},
    ),
)


def _counts_from_top_left(spec: AttentionSpec) -> bool:
    """Whether the band counts from the top left, while kernels count from the bottom right."""
    return spec.band != (None, None) and spec.meaning.causal_alignment != "bottom_right"


_WRONG_CORNER = (
    Rule[AttentionSpec](
        "flash/top_left_of_sequences",
        lambda s: _counts_from_top_left(s) and needs_packing(s) and not s.meaning.same_lengths,
        "causality and windows from the top left: kernels count from the last query and key of "
        "a sequence, which is the same only where it has as many keys as queries",
    ),
    Rule[AttentionSpec](
        "flash/top_left",
        lambda s: (
            _counts_from_top_left(s)
            and not needs_packing(s)
            and not all(side is None or side >= 0 for side in band_from_the_end(s))
        ),
        "causality and windows from the top left with {queries} queries and {keys} keys: kernels "
        "count from the last of both, and no side of a window may be below 0",
        facts=lambda s: {"queries": s.seq_len_q, "keys": s.seq_len_kv},
    ),
)
