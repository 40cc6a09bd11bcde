"""The features of calls beyond plain attention, by the names that implementations list as known.

An implementation refuses calls with features that it does not list, so a feature that is added here
later is never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Reason, Rule

_OFFSET = "causal_alignment as a number"

_HAS: dict[str, Callable[[AttentionSpec], bool]] = {
    "causality and windows": lambda spec: spec.band != (None, None),
    "local_window_size as an array": lambda spec: spec.has("window"),
    _OFFSET: lambda spec: spec.meaning.causal_alignment == "by_offset" and spec.has_diagonal,
    "key and value in pages": lambda spec: spec.is_paged,
    "key and value in one pool of pages": lambda spec: spec.meaning.value_page > 0,
    "lengths": lambda spec: spec.has("query_seq_lengths") or spec.has("key_value_seq_lengths"),
    "segment ids": lambda spec: spec.has("query_segment_ids"),
    "cu_seqlens": lambda spec: spec.has("cu_seqlens_q"),
    "mask": lambda spec: spec.has("mask"),
    "bias": lambda spec: spec.has("bias"),
    "alibi_slopes": lambda spec: spec.has("alibi_slopes"),
    "sinks": lambda spec: spec.has("sinks"),
    "logits_soft_cap": lambda spec: spec.meaning.logits_soft_cap is not None,
    "score_mod": lambda spec: spec.meaning.score_mod is not None,
    "mask_mod": lambda spec: spec.meaning.mask_mod is not None,
    "dropout": lambda spec: spec.meaning.dropout_rate > 0,
    "deterministic_backward": lambda spec: spec.meaning.deterministic_backward and spec.is_backward,
    "the row maximum": lambda spec: spec.wanted.needs_max,
    "the dropout mask as a result": lambda spec: spec.wanted.needs_keep,
    "the gradient of lse": lambda spec: spec.has("lse_grad"),
    "the gradient of bias": lambda spec: "bias" in spec.wanted.gradients,
    "the gradient of alibi_slopes": lambda spec: "alibi_slopes" in spec.wanted.gradients,
    "the gradient of sinks": lambda spec: "sinks" in spec.wanted.gradients,
    "the gradient of what score_mod reads": lambda spec: any(
        map(is_mod_operand, spec.wanted.gradients)
    ),
}

FEATURES = tuple(_HAS)
"""All features. Every implementation knows, beside these, query, key and value of any lengths and
heads, a scale, and lse as a result."""


def features_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The features that a call has."""
    return tuple(name for name, has in _HAS.items() if has(spec))


_REMEDIES = {
    _OFFSET: 'pass causal_alignment="bottom_right" with key_value_seq_lengths, if that means the '
    "same",
    "local_window_size as an array": "jax.lax.switch over calls with static windows",
    "the gradient of alibi_slopes": "jax.lax.stop_gradient of the slopes before the call, if they "
    "are constants",
    "the gradient of what score_mod reads": "jax.lax.stop_gradient of the arrays before the call, "
    "if they are constants",
}


def feature_rule(name: str, text: str, remedy: str = "") -> Rule[AttentionSpec]:
    """The rule of kernels without this feature."""
    return Rule(f"feature/{name}", _HAS[name], text, remedy or _REMEDIES.get(name, ""))


OFFSET_RULE = f"feature/{_OFFSET}"
"""The rule of kernels that take no number as causal_alignment."""


def unknown_features(spec: AttentionSpec, known: Collection[str], whose: str) -> tuple[Reason, ...]:
    """The reasons against a call with features that an implementation does not know.

    Args:
      spec: the call.
      known: the features that the implementation knows.
      whose: the end of the sentences, after the feature: "toy has none".
    """
    unknown = (x for x, has in _HAS.items() if x not in known and has(spec))
    return tuple(feature_rule(x, f"{x}: {whose}").reason(spec) for x in unknown)
