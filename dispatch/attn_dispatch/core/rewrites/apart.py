"""What XLA computes beside the kernel: some gradients, or the row maximum, in blocks of its own.

It forms the scores once more, but the kernel has all the rest. Not a gradient under dropout: only
the kernel knows its mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_dispatch.call.options import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, changed, for_, gradients_without


@dataclass(frozen=True)
class GradientApart:
    operand: str
    moves_dropout: bool = False

    @property
    def name(self) -> str:
        return f"the gradient of {self.operand}: by XLA, beside the kernel"

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        if self.operand not in spec.wanted.gradients or spec.meaning.dropout_rate:
            return None
        if self.operand == "bias" and spec.shape("bias")[3] == 1:
            return None  # row_bias.py knows it without the scores
        return changed(
            spec, wanted=replace(spec.wanted, gradients=gradients_without(spec, self.operand))
        )

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        own = changed(spec, wanted=replace(spec.wanted, gradients=(self.operand,)))
        return calls.kernel(inner, operands) | calls.xla(own, operands)


@dataclass(frozen=True)
class ReadGradientsApart:
    name: str = "the gradients of what score_mod reads: by XLA, beside the kernel"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        read = tuple(x for x in spec.wanted.gradients if is_mod_operand(x))
        if not read or spec.meaning.dropout_rate or spec.meaning.deterministic_backward:
            return None  # XLA may add them up in any order
        return changed(spec, wanted=replace(spec.wanted, gradients=gradients_without(spec, *read)))

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        own = changed(
            spec,
            wanted=replace(spec.wanted, gradients=gradients_without(spec, *inner.wanted.gradients)),
        )
        return calls.kernel(inner, operands) | calls.xla(own, operands)


@dataclass(frozen=True)
class MaximumApart:
    name: str = "the row maximum: by XLA, beside the kernel"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        return (
            changed(spec, wanted=replace(spec.wanted, needs_max=False))
            if spec.wanted.needs_max
            else None
        )

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        # Neither of them is in it.
        own = changed(
            spec,
            without=("dropout_key", "dropout_start", "sinks"),
            meaning=replace(spec.meaning, dropout_rate=0.0, dropout_impl=None),
            wanted=replace(spec.wanted, needs_keep=False),
        )
        row_max = calls.xla(own, for_(own, operands))["row_max"]
        return calls.kernel(inner, operands) | {"row_max": row_max}
