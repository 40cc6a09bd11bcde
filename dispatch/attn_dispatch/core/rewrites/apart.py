"""What XLA computes beside the kernel: some gradients, or the row maximum, in blocks of its own.

It forms the scores once more, but the kernel has all the rest. Not a gradient under dropout: only
the kernel knows its mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec, is_mod_operand
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, changed, for_, gradients_without


@dataclass(frozen=True)
class GradientApart:
    operand: str
    moves_dropout: bool = False

    @property
    def name(self) -> str:
        return f"the gradient of {self.operand}: by XLA, beside the kernel"

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        if self.operand not in spec.options.gradients or spec.options.dropout_rate:
            return None
        if self.operand == "bias" and spec.shape("bias")[3] == 1:
            return None  # row_bias.py knows it without the scores
        return changed(spec, gradients=gradients_without(spec, self.operand))

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        own = changed(spec, gradients=(self.operand,))
        return calls.kernel(inner, operands) | calls.xla(own, operands)


@dataclass(frozen=True)
class ReadGradientsApart:
    name: str = "the gradients of what score_mod reads: by XLA, beside the kernel"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        read = tuple(x for x in spec.options.gradients if is_mod_operand(x))
        if not read or spec.options.dropout_rate or spec.options.deterministic_backward:
            return None  # XLA may add them up in any order
        return changed(spec, gradients=gradients_without(spec, *read))

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        own = changed(spec, gradients=gradients_without(spec, *inner.options.gradients))
        return calls.kernel(inner, operands) | calls.xla(own, operands)


@dataclass(frozen=True)
class MaximumApart:
    name: str = "the row maximum: by XLA, beside the kernel"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        return changed(spec, needs_max=False) if spec.options.needs_max else None

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        # Neither of them is in it.
        without: dict = {"without": ("dropout_key", "dropout_start", "sinks"), "dropout_rate": 0.0}
        own = changed(spec, **without, dropout_impl=None, needs_keep=False)
        row_max = calls.xla(own, for_(own, operands))["row_max"]
        return calls.kernel(inner, operands) | {"row_max": row_max}
