"""The calls that this version does not run through cuDNN, found without asking cuDNN.

Kernels with known bugs are excluded in cuda_backend/known_bad.cc. cuDNN refuses the rest that it
has no kernel for, when it plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_dispatch import settings
from attn_dispatch.call.features import feature_rule, unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn.call import (
    CudnnCall,
    band_of,
    counts_alibi_from_lengths,
    has_score_bias,
)
from attn_dispatch.cudnn.score_nodes import nodes_of
from attn_dispatch.programs.program import is_finite
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.common_rules import (
    DECIDED,
    DROPOUT_KEYS,
    DTYPE,
    EMPTY,
    MAX_SEGMENTS,
    ROW_BIAS_GRADIENT,
    scale_rule,
)

_WIDEST_HEAD = 2048
"""On sm90 cuDNN compiles forward kernels for heads of any width: in 2 s for 1,024, 6 s for 4,096,
and more than 10 s for 16,384, for each variant of the call (9.28)."""

_INT32_LIMIT = 2**31

_WITHOUT_ARRAYS_BY_ROW = ("sm8", "sm12")
"""The archs whose backward kernels read no arrays by row, those with values for each query, beside
lse and delta."""

_MAX_ARRAYS_BY_ROW = 2
"""The most arrays by row that other backward kernels can read beside lse and delta. cuDNN
refuses too many arrays of floats, but does not count arrays of integers, and then reads wrong
numbers (H200, 9.19, 9.28)."""


def _takes_a_mask(spec: AttentionSpec) -> bool:
    """Whether the call could have a mask as an array and break no rule because of it."""
    return not spec.is_packed and is_finite(spec.meaning.score_mod)


def _remedy_other_mask(spec: AttentionSpec) -> str:
    return "pass causality and the window as a mask" if _takes_a_mask(spec) else ""


def _remedy_packed_bias(spec: AttentionSpec) -> str:
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    if is_bottom_right and spec.band != (None, None):
        return ""  # padded, the call would break cudnn/bottom_right
    return "pass a padded batch with lengths"


def _remedy_mask_mod(spec: AttentionSpec) -> str:
    if _takes_a_mask(spec):
        return "pass mask instead of mask_mod"
    return "use causality or a window instead of mask_mod, if they express it"


def _sums_a_row_bias(spec: AttentionSpec) -> bool:
    return ROW_BIAS_GRADIENT.applies(spec) and spec.seq_len_kv > 1


_RULES = (
    feature_rule(
        "the gradient of what score_mod reads",
        "cuDNN does not compute the gradient of what score_mod reads",
    ),
    EMPTY,
    Rule[AttentionSpec](
        "cudnn/widest_head",
        lambda s: max(s.head_dim, s.head_dim_v) > _WIDEST_HEAD,
        f"heads wider than {_WIDEST_HEAD:,}, got {{head_dim:,}} and {{head_dim_v:,}}: cuDNN would "
        "compile them for minutes",
        facts=lambda s: {"head_dim": s.head_dim, "head_dim_v": s.head_dim_v},
    ),
    Rule[AttentionSpec](
        "cudnn/int32_length",
        lambda s: not s.symbols and max(s.seq_len_q, s.seq_len_kv) >= _INT32_LIMIT,
        "2^31 queries or keys or more, got {queries:,} and {keys:,}: cuDNN counts them in 32 bits",
        facts=lambda s: {"queries": s.seq_len_q, "keys": s.seq_len_kv},
    ),
    MAX_SEGMENTS,
    feature_rule(
        "local_window_size as an array",
        "local_window_size as an array: cuDNN's window is static",
    ),
    feature_rule(
        "causal_alignment as a number",
        "causal_alignment as a number: cuDNN's diagonal starts in a corner",
    ),
    scale_rule("cudnn/scale", "cuDNN multiplies"),
    Rule[AttentionSpec](
        "cudnn/packed_bias",
        lambda s: s.is_packed and has_score_bias(s),
        "packed sequences: cuDNN counts a bias or mask from the start of each sequence",
        _remedy_packed_bias,
    ),
    Rule[AttentionSpec](
        "cudnn/packed_keep",
        lambda s: s.is_packed and s.wanted.needs_keep,
        "packed sequences: this version does not return the dropout mask",
        "ask for the mask of a call that is not packed",
    ),
    Rule[AttentionSpec](
        "cudnn/sinks_by_row",
        # The backward pass does not need them.
        lambda s: s.has("sinks") and s.shape("sinks")[0] > 1 and not s.is_backward,
        "sinks: cuDNN has one for each head",
        "pass [N], or make a call per batch row",
    ),
    Rule[AttentionSpec](
        "cudnn/score_mod_nan",
        lambda s: s.has("mask") and not is_finite(s.meaning.score_mod),
        "score_mod: may be NaN where the mask forbids a pair, and cuDNN only adds -inf there",
        "write score_mod without operations that may give NaN, such as a division by anything but "
        "a constant",
    ),
    Rule[AttentionSpec](
        "cudnn/sinks_mask_mod",
        # A row to which only mask_mod leaves no key gets the sink as its lse.
        lambda s: s.has("sinks") and s.meaning.mask_mod is not None and not s.is_backward,
        "sinks beside a mask_mod: in a row that attends to no key, cuDNN attends to the sink",
        _remedy_mask_mod,
    ),
    Rule[AttentionSpec](
        "cudnn/alibi_by_row",
        lambda s: s.has("alibi_slopes") and s.shape("alibi_slopes")[0] > 1,
        "alibi_slopes: cuDNN has one for each head",
        "pass [N], or make a call per batch row",
    ),
    replace(ROW_BIAS_GRADIENT, applies=_sums_a_row_bias),
    replace(DROPOUT_KEYS, text="dropout: cuDNN has one key for each call"),
    feature_rule(
        "the gradient of alibi_slopes", "cuDNN does not compute the gradient of alibi_slopes"
    ),
    Rule[AttentionSpec](
        "cudnn/alibi_from_lengths",
        counts_alibi_from_lengths,
        "alibi_slopes: cuDNN does not count distances from the bottom right of lengths",
        lambda s: "" if s.is_packed else "pass the distances as a bias",
    ),
    Rule[AttentionSpec](
        "cudnn/bottom_right",
        lambda s: band_of(s) is None,
        "cuDNN cannot combine this bottom-right window or causality with a bias, a mask, ALiBi or "
        "dropout",
        _remedy_other_mask,
    ),
    DTYPE,
)


def not_supported_reasons(spec: AttentionSpec) -> tuple[Reason, ...]:
    """Every rule the call breaks."""
    reasons = broken(_RULES, spec) + unknown_features(spec, DECIDED, "cuDNN has none")
    if spec.meaning.mods and isinstance(why := nodes_of(spec, packed=False), Reason):
        reasons += (why,)
    return reasons


@dataclass(frozen=True)
class _Variant:
    """One variant of a call, and its device."""

    call: CudnnCall
    arch: str
    whole_pages: bool

    @property
    def max_arrays_by_row(self) -> int:
        return 0 if self.arch.startswith(_WITHOUT_ARRAYS_BY_ROW) else _MAX_ARRAYS_BY_ROW


_VARIANT_RULES = (
    Rule[_Variant](
        "cudnn/pages",
        # Correct, except for NaN behind the last key of a page (H200, 9.19 and 9.28).
        lambda v: v.call.page_size > 0 and not (v.call.decodes or v.whole_pages),
        "keys in pages: cuDNN multiplies by what is stored past a length, from where NaN would "
        "spread, unless each row has one query and no option but a scale",
        lambda v: "" if settings.current().rewrites else "allow rewrites: rewrites(True)",
    ),
    Rule[_Variant](
        "cudnn/page_size",
        lambda v: v.call.page_size.bit_count() > 1,
        "pages of {page_size} keys: cuDNN needs a power of two",
        "make pages of 16, 64 or 256 keys",
        facts=lambda v: {"page_size": v.call.page_size},
    ),
    Rule[_Variant](
        "cudnn/int32_packed",
        lambda v: v.call.packed_elements >= _INT32_LIMIT,
        "packed sequences: an array has {elements:,} elements, past cuDNN's 32-bit offsets "
        "(heads of {head_dim} and {head_dim_v}, as padded)",
        facts=lambda v: {
            "elements": v.call.packed_elements,
            "head_dim": v.call.head_dim,
            "head_dim_v": v.call.head_dim_v,
        },
    ),
    Rule[_Variant](
        "cudnn/bias_of_one_pair",
        # lse is off by the difference of two heads' biases (H200, 9.19).
        lambda v: (
            v.call.seq_len_q == v.call.seq_len_kv == 1
            and max(v.call.bias_batch, v.call.bias_heads) > 1
        ),
        "a bias of one query and one key: cuDNN reads the same number for all heads",
    ),
    Rule[_Variant](
        "cudnn/batch_of_one_row",
        lambda v: v.call.reads_batch_of_one_row,
        "a mod reads an array by b alone, in a call of one query, which cuDNN computes wrongly",
    ),
    Rule[_Variant](
        "cudnn/arrays_by_row",
        lambda v: v.call.backward and v.call.arrays_by_row > v.max_arrays_by_row,
        "mods: cuDNN's backward pass on {arch} can read {most} arrays with values for each query, "
        "and mods and lengths need {arrays}",
        facts=lambda v: {
            "most": v.max_arrays_by_row,
            "arch": v.arch,
            "arrays": v.call.arrays_by_row,
        },
    ),
)


def variant_reason(call: CudnnCall, arch: str, *, whole_pages: bool = False) -> Reason | None:
    """The first reason why cuDNN must not be asked to plan this variant; None without any.

    Args:
      call: the variant.
      arch: the device's, such as "sm90".
      whole_pages: whether the pages that kernels may read hold real keys only.
    """
    variant = _Variant(call, arch, whole_pages)
    return next((x.reason(variant) for x in _VARIANT_RULES if x.applies(variant)), None)
