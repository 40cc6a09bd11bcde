"""A chain of rewrites that leads from a call to one that a kernel runs, and its computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Calls, Compute, NamedArrays, Rewrite, for_
from attn_dispatch.reason import Reason

Step = tuple[Rewrite, AttentionSpec]
"""A rewrite, and the call that it is applied to."""


@dataclass(frozen=True)
class Chain:
    """Rewrites, one applied after the other, and the call that results."""

    steps: tuple[Step, ...]
    spec: AttentionSpec
    """The call after the last step, which the kernel is to run."""
    reasons: tuple[Reason, ...]
    """Why the kernel cannot run `spec`; empty if it can."""
    beside: tuple[tuple[AttentionSpec, Chain], ...] = ()
    """The calls that steps need in addition to their inner call (`Rewrite.beside`), each with its
    chain."""
    undivided: AttentionSpec | None = None
    """The call before it was divided to stay within the limit on scratch memory, if it was."""
    limit: str = ""
    """What was done because of the limit on scratch memory; empty if nothing was."""
    nearest: tuple[int, tuple[Reason, ...]] = (0, ())
    """The number of steps after which the call breaks the fewest rules, and its reasons there. If
    several calls break as few, this is the last. Only used if the chain ends with reasons."""

    @property
    def first(self) -> AttentionSpec:
        """The call before the first step."""
        return self.steps[0][1] if self.steps else self.spec

    @property
    def may_fall_back(self) -> bool:
        """Whether the program decides when it runs that XLA computes the call instead."""
        return any(rewrite.may_fall_back for rewrite, _ in self.steps)

    @property
    def is_constant(self) -> bool:
        """Whether a step makes constants, so that `spec` never runs."""
        return any(rewrite.is_constant for rewrite, _ in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rewrite.name for rewrite, _ in self.steps))

    def after(self, number: int) -> AttentionSpec:
        """The call after `number` steps."""
        return self.steps[number][1] if number < len(self.steps) else self.spec

    def compute(
        self, operands: NamedArrays, kernel: Compute, xla: Compute
    ) -> tuple[jax.Array, ...]:
        """The results of the first call, in the order of its `result_names`."""
        results = self._step(0, operands, kernel, xla)
        return tuple(results[name] for name in self.first.result_names)

    def _step(self, i: int, operands: NamedArrays, kernel: Compute, xla: Compute) -> NamedArrays:
        if i == len(self.steps):
            return dict(kernel(self.spec, operands))
        rewrite, spec = self.steps[i]

        def beside(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> NamedArrays:
            chain = dict(self.beside)[spec]
            # `operands` has the arrays of both calls: leave out those that this one lacks.
            results = chain.compute(for_(chain.first, operands), kernel, xla)
            return dict(zip(spec.result_names, results, strict=True))

        def inner_call(operands: Mapping[str, jax.Array]) -> NamedArrays:
            return self._step(i + 1, dict(operands), kernel, xla)

        calls = Calls(inner_call, xla, beside)
        results = rewrite.compute(spec, self.after(i + 1), operands, calls)
        return {name: results[name] for name in spec.result_names}


def divided(chain: Chain, steps: Sequence[Rewrite]) -> Chain:
    """The chain with its last call divided into parts; each step divides the previous one's parts.

    No steps leave the chain as it is.
    """
    spec, taken, beside = chain.spec, list(chain.steps), dict(chain.beside)
    for i, step in enumerate(steps):
        inner = step.applied(spec)
        assert inner is not None, f"{step} of {spec}"
        if (rest := step.beside(spec)) is not None:
            beside[rest] = divided(Chain((), rest, ()), steps[i + 1 :])
        taken.append((step, spec))
        spec = inner
    undivided = chain.spec if steps else None
    return replace(
        chain, steps=_merged(taken), spec=spec, beside=tuple(beside.items()), undivided=undivided
    )


def _merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps, where parts of parts along one axis become the smaller parts of the whole.

    A loop inside another would need the memory of both.
    """
    merged: list[Step] = []
    for step, spec in steps:
        if merged and _are_parts_of_parts(merged[-1], (step, spec)):
            spec = merged.pop()[1]
        merged.append((step, spec))
    return tuple(merged)


def _are_parts_of_parts(outer: Step, inner: Step) -> bool:
    """Whether the inner step's parts also divide the outer step's call into equal parts."""
    (larger, whole), (smaller, part) = outer, inner
    if larger.parts is None or smaller.parts is None or larger.parts.axis != smaller.parts.axis:
        return False
    return smaller.applied(whole) == smaller.applied(part) and smaller.beside(whole) is None
