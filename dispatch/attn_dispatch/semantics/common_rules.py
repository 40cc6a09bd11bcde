"""Rules that the kernels of several vendors share."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Rule
from attn_dispatch.semantics.scaled_query import is_out_of_range

DECIDED = (
    "causality and windows", "local_window_size as an array", "causal_alignment as a number",
    "key and value in pages", "key and value in one pool of pages", "lengths", "segment ids",
    "cu_seqlens", "mask", "bias", "alibi_slopes", "sinks", "logits_soft_cap", "score_mod",
    "mask_mod", "dropout", "deterministic_backward", "the row maximum",
    "the dropout mask as a result", "the gradient of lse", "the gradient of bias",
    "the gradient of alibi_slopes", "the gradient of sinks",
    "the gradient of what score_mod reads",
)  # fmt: skip
"""The features that cuDNN and AITER run in some calls at least, or refuse by rules of their own.
One that a later version adds is not among them, so that both refuse it until they know it."""

DTYPE = Rule[AttentionSpec](
    "dtype",
    lambda c: c.dtype not in ("float16", "bfloat16"),
    "needs float16 or bfloat16, got {dtype}",
    "cast query, key and value to bfloat16",
    facts=lambda c: {"dtype": c.dtype},
)
"""For an AttentionSpec or a vendor's description of a call: both have a dtype."""

MAX_SEGMENTS = Rule[AttentionSpec](
    "max_segments",
    lambda s: s.has("query_segment_ids") and s.meaning.max_segments is None,
    "segment ids: kernels need max_segments",
    "pass max_segments, the largest id that any row may hold",
)

EMPTY = Rule[AttentionSpec](
    "empty",
    lambda s: s.is_empty or 0 in (s.head_dim, s.head_dim_v),
    "an axis has length zero, so there is nothing to compute",
)

ROW_BIAS_GRADIENT = Rule[AttentionSpec](
    "row_bias_gradient",
    # The terms cancel, and kernels round each of them to 16 bits before they are summed.
    lambda s: "bias" in s.wanted.gradients and s.shape("bias")[3] == 1,
    "the gradient of a bias that is the same for all keys would be inaccurate",
    lambda s: _remedy_without_bias(s),
)

DROPOUT_KEYS = Rule[AttentionSpec](
    "dropout_keys",
    lambda s: s.meaning.dropout_rate > 0 and s.shape("dropout_key")[0] > 1,
    "several dropout keys in one call",
    "pass one dropout_key for the whole batch",
)


def _remedy_without_bias(spec: AttentionSpec) -> str:
    """The remedy for the gradient of a bias that is the same for all keys; empty if there is none.

    Softmax cancels such a bias, except from lse and from the denominator with sinks. So without
    sinks and a gradient of lse, its gradient is 0.
    """
    if spec.has("sinks") or spec.has("lse_grad"):
        return ""
    return "pass jax.lax.stop_gradient(bias): its gradient is 0"


def scale_rule(name: str, who: str) -> Rule[AttentionSpec]:
    """The rule on scales, by the vendor's name for it: who "multiply by it in float32"."""
    return Rule(
        name,
        is_out_of_range,
        f"scale {{scale:g}}: {who} by it in float32, where it or its reciprocal is no normal "
        "number",
        _scale_remedy,
        facts=lambda s: {"scale": s.meaning.scale},
    )


def _scale_remedy(spec: AttentionSpec) -> str:
    """A remedy for a scale that is no normal float32 number; float16 holds no product with one
    that is too large."""
    if spec.dtype == "float16" and abs(spec.meaning.scale) > 1:
        return ""
    return f"multiply query by the scale, if {spec.dtype} holds the product, and pass scale=1"
