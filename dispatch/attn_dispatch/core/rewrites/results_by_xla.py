"""Some gradients, or the row maximum, computed by XLA in blocks; the kernel computes the rest.

XLA computes the scores a second time. These rewrites do not apply to gradients under dropout,
because only the kernel knows its mask.
"""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    BACKWARD,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    gradients_without,
)


def _wanting(spec: AttentionSpec, *gradients: str) -> AttentionSpec:
    """The backward call with these gradients as results."""
    return changed(spec, wanted=replace(spec.wanted, gradients=gradients))


def _gradient_by_xla(operand: str, *, needed_for: str = "") -> Rewrite:
    """The rewrite by which XLA computes the gradient of this operand."""

    def when(spec: AttentionSpec) -> bool:
        if operand not in spec.wanted.gradients or spec.meaning.dropout_rate:
            return False
        # row_bias.py needs no scores for the gradient of a bias that is the same for all keys.
        return operand != "bias" or spec.shape("bias")[3] != 1

    def compute(
        spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
    ) -> NamedArrays:
        own = _wanting(spec, operand)
        return calls.kernel(operands) | calls.xla(own, operands)

    return Rewrite(
        f"the gradient of {operand}: by XLA, beside the kernel",
        lambda spec: _wanting(spec, *gradients_without(spec, operand)),
        compute,
        asked_of=BACKWARD,
        when=when,
        reads_lse=True,
        needed_for=needed_for,
    )


ALIBI_GRADIENT_BY_XLA = _gradient_by_xla("alibi_slopes")
BIAS_GRADIENT_BY_XLA = _gradient_by_xla("bias", needed_for="bias/soft_cap_bf16_d128_128x320")


def _mod_gradients(spec: AttentionSpec) -> tuple[str, ...]:
    """The wanted gradients of arrays that score_mod reads."""
    return tuple(x for x in spec.wanted.gradients if is_mod_operand(x))


def _applies_to_mod_gradients(spec: AttentionSpec) -> bool:
    # XLA may sum these gradients in any order.
    return (
        bool(_mod_gradients(spec))
        and not spec.meaning.dropout_rate
        and not spec.meaning.deterministic_backward
    )


def _compute_mod_gradients(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    own = _wanting(spec, *gradients_without(spec, *inner.wanted.gradients))
    return calls.kernel(operands) | calls.xla(own, operands)


MOD_GRADIENTS_BY_XLA = Rewrite(
    "the gradients of what score_mod reads: by XLA, beside the kernel",
    lambda spec: _wanting(spec, *gradients_without(spec, *_mod_gradients(spec))),
    _compute_mod_gradients,
    asked_of=BACKWARD,
    when=_applies_to_mod_gradients,
    reads_lse=True,
    needed_for="found/score_mod_arrays_by_row",
)


def _compute_maximum(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    # Dropout and sinks do not change the maximum.
    own = changed(
        spec,
        without=("dropout_key", "dropout_start", "sinks"),
        meaning=replace(spec.meaning, dropout_rate=0.0, dropout_impl=None),
        wanted=replace(spec.wanted, needs_keep=False),
    )
    row_max = calls.xla(own, for_(own, operands))["row_max"]
    return calls.kernel(operands) | {"row_max": row_max}


MAXIMUM_BY_XLA = Rewrite(
    "the row maximum: by XLA, beside the kernel",
    lambda spec: changed(spec, wanted=replace(spec.wanted, needs_max=False)),
    _compute_maximum,
    when=lambda spec: spec.wanted.needs_max,
)
