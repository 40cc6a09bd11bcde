"""The rewrites that bring a call to a kernel, one after the other, and how they compute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import Arrays, Calls, Compute, Rewrite, for_
from attn_dispatch.reason import Reason

Step = tuple[Rewrite, AttentionSpec]
"""A rewrite and the call that it rewrites."""


@dataclass(frozen=True)
class Chain:
    """The rewrites that bring a call to the kernel, each with the call that it rewrites."""

    steps: tuple[Step, ...]
    spec: AttentionSpec
    """The call that the kernel is asked for."""
    reasons: tuple[Reason, ...]
    """Why the kernel does not run that call either."""
    beside: tuple[tuple[AttentionSpec, Chain], ...] = ()
    """The calls that some of the rewrites need beside their inner call (`Rewrite.beside`)."""
    undivided: AttentionSpec | None = None
    """The last call before the limit on scratch memory divided it, if it did."""
    limit: str = ""
    """What the limit did, if anything."""
    nearest: tuple[int, tuple[Reason, ...]] = (0, ())
    """The number of steps after which the call breaks the fewest rules, and what speaks against it
    there; the last such call, of a chain that ends with reasons."""

    @property
    def first(self) -> AttentionSpec:
        """The call that was rewritten."""
        return self.steps[0][1] if self.steps else self.spec

    @property
    def may_fall_back(self) -> bool:
        """Whether it is decided when the call runs that XLA computes it after all."""
        return any(rewrite.may_fall_back for rewrite, _ in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rewrite.name for rewrite, _ in self.steps))

    def after(self, number: int) -> AttentionSpec:
        """The call after so many of the steps."""
        return self.steps[number][1] if number < len(self.steps) else self.spec

    def compute(self, operands: Arrays, kernel: Compute, xla: Compute) -> tuple[jax.Array, ...]:
        """The results of the call that was rewritten, in order."""
        # A call beside another gets the arrays of both.
        results = self._step(0, for_(self.first, operands), kernel, xla)
        return tuple(results[name] for name in self.first.result_names)

    def _step(self, i: int, operands: Arrays, kernel: Compute, xla: Compute) -> Arrays:
        if i == len(self.steps):
            return dict(kernel(self.spec, operands))
        rewrite, spec = self.steps[i]

        def beside(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Arrays:
            chain = dict(self.beside)[spec]
            results = chain.compute(dict(operands), kernel, xla)
            return dict(zip(spec.result_names, results, strict=True))

        calls = Calls(lambda _, x: self._step(i + 1, dict(x), kernel, xla), xla, beside)
        results = rewrite.compute(spec, self.after(i + 1), operands, calls)
        return {name: results[name] for name in spec.result_names}


def in_parts(chain: Chain, steps: Sequence[Rewrite]) -> Chain:
    """The chain with its last call in parts, if any, each divided further as the next one says."""
    spec, taken, beside = chain.spec, list(chain.steps), dict(chain.beside)
    for i, step in enumerate(steps):
        inner = step.applied(spec)
        assert inner is not None, f"{step} of {spec}"
        if (rest := step.beside(spec)) is not None:
            beside[rest] = in_parts(Chain((), rest, ()), steps[i + 1 :])
        taken.append((step, spec))
        spec = inner
    undivided = chain.spec if steps else None
    return replace(
        chain, steps=_merged(taken), spec=spec, beside=tuple(beside.items()), undivided=undivided
    )


def _merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Parts of parts along one axis as the smaller parts of the whole: a loop within a loop would
    hold what both of them take."""
    merged: list[Step] = []
    for step, spec in steps:
        if merged and _are_parts_of_parts(merged[-1], (step, spec)):
            spec = merged.pop()[1]
        merged.append((step, spec))
    return tuple(merged)


def _are_parts_of_parts(outer: Step, inner: Step) -> bool:
    """Whether the inner step's parts are equal parts of the outer step's call, too."""
    (larger, whole), (smaller, part) = outer, inner
    if larger.parts is None or smaller.parts is None or larger.parts.axis != smaller.parts.axis:
        return False
    return smaller.applied(whole) == smaller.applied(part) and smaller.beside(whole) is None
