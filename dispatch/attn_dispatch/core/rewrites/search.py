"""The search for rewrites that lead from the caller's call to one that a kernel runs.

It knows no implementation: eligibility.py gives it a function with the reasons against a call.

A rewrite is taken where the kernel refuses a call, and the inner call no longer breaks some rule
that the call breaks. The search goes through the list again until no rewrite helps. A preferred
rewrite is taken wherever it brings no new reason. No rewrite leads back to an earlier call, because
two could undo each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from attn_dispatch.call.options import backward_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.catalogue import ONE_BY_ONE, REWRITES
from attn_dispatch.core.rewrites.chain import Chain, Step, divided
from attn_dispatch.core.rewrites.large import parts_of_a_large_call
from attn_dispatch.core.rewrites.rewrite import Rewrite, forward_of
from attn_dispatch.reason import Reason, rules_of

Reasons = Callable[[AttentionSpec], tuple[Reason, ...]]

ChooseParts = Callable[[Sequence[Chain]], tuple[Rewrite, ...]]
"""Chooses how to divide the last calls of all these chains into parts; () leaves them whole."""


def _as_they_are(chains: Sequence[Chain]) -> tuple[Rewrite, ...]:
    return ()


@dataclass(frozen=True)
class Terms:
    """What a search for rewrites may use; the same for all calls that it comes to."""

    reasons_against: Reasons
    """Returns why the implementation cannot run a call, considering only the call's direction."""
    preferred: Sequence[Rewrite] = ()
    """The rewrites to take even if the call breaks no rule."""
    choose_parts: ChooseParts = _as_they_are
    """Chooses the parts into which the last call is divided."""
    may_fall_back: bool = True
    """Whether to allow rewrites after which XLA may compute the call instead."""
    first: str | None = None
    """The name of a rewrite to take first, even if the call breaks no rule."""


def rewritten(spec: AttentionSpec, terms: Terms) -> Chain:
    """The rewrites for a call. They lead to a call without reasons, if rewrites can remove them."""
    if not spec.meaning.dropout_rate:
        chain = _chain(spec, terms, None)
        return chain if chain.reasons else divided(chain, terms.choose_parts([chain]))
    # The forward call decides where the mask is drawn; the backward pass and dropout_mask follow.
    # Parts are chosen for the forward call and for the backward call with all its gradients.
    forward = forward_of(spec)
    first_chain = _chain(forward, terms, None)
    moves = frozenset(x.name for x, _ in first_chain.steps if x.moves_dropout)
    chain = _chain(spec, terms, moves)
    if chain.reasons:
        return chain
    wanted = forward.options.differentiable
    backward = forward.backward(backward_options(forward.options, wanted, has_lse_grad=False))
    both = (first_chain, _chain(backward, terms, moves))
    return divided(chain, terms.choose_parts([x for x in both if not x.reasons]))


def _chain(spec: AttentionSpec, terms: Terms, moves: frozenset[str] | None) -> Chain:
    """The chain of a call, not divided into parts.

    Args:
      moves: the names of the rewrites with `moves_dropout` that must be taken; any other such
        rewrite is forbidden. None leaves the choice to the search.
    """
    search = _Search(spec, terms, moves)
    search.begin_with(terms.first)
    search.prefer(terms.preferred)
    search.remove_reasons()
    found = search.others.items()
    return Chain(
        tuple(search.steps), search.spec, search.reasons, tuple(found), nearest=search.nearest
    )


@dataclass
class _Search:
    """The state of a search: the call so far, and the steps that led to it."""

    spec: AttentionSpec
    terms: Terms
    moves: frozenset[str] | None
    """See `_chain`."""
    steps: list[Step] = field(default_factory=list[Step])
    reasons: tuple[Reason, ...] = ()
    """Why the kernel cannot run `spec`."""
    others: dict[AttentionSpec, Chain] = field(default_factory=dict[AttentionSpec, Chain])
    """The calls that rewrites need in addition to their inner calls, each with its chain."""
    nearest: tuple[int, tuple[Reason, ...]] = (0, ())
    """See `Chain.nearest`."""

    def begin_with(self, first: str | None) -> None:
        """Take the rewrite of this name, if it applies; then find the call's reasons."""
        for rewrite in (*REWRITES, *ONE_BY_ONE) if first else ():
            inner = rewrite.applied(self.spec) if rewrite.name == first else None
            if inner is not None:
                self._against(rewrite, self.spec, inner)
                self.steps.append((rewrite, self.spec))
                self.spec = inner
        self.reasons = self.terms.reasons_against(self.spec)
        self.nearest = len(self.steps), self.reasons

    def prefer(self, rewrites: Sequence[Rewrite]) -> None:
        """Take each of these rewrites that applies and brings no new reason."""
        for rewrite in rewrites:
            if self.moves is not None and rewrite.name not in self.moves:
                continue
            if rewrite.enables is not None and not self.reasons:
                continue
            if self._is_too_late_for(rewrite):
                continue
            if not (found := rewrite.inner_calls(self.spec)):
                continue
            inner, *enabled = found
            left = brought = self._against(rewrite, self.spec, inner)
            if enabled:
                brought = self.terms.reasons_against(enabled[-1])
            if set(brought) <= set(self.reasons):
                self._take([(rewrite, self.spec)], inner, left)

    def remove_reasons(self) -> None:
        """Take rewrites that remove a reason, until none does."""
        before = -1
        while before < len(self.steps) and (self.reasons or self.moves):
            before = len(self.steps)
            for parts in parts_of_a_large_call(self.spec):
                if self._try(parts):
                    break
            for rewrite in REWRITES:
                if not self._is_too_late_for(rewrite):
                    self._try((rewrite,))

    def _try(self, rewrites: Sequence[Rewrite]) -> bool:
        """Take these rewrites in order if they must be taken, or if together they end the breach of
        a rule. Returns whether they were taken."""
        must_be = self._must_be_taken(rewrites)
        if must_be is False or not (must_be or self.reasons):
            return False
        steps: list[Step] = []
        spec, left = self.spec, self.reasons
        for rewrite in rewrites:
            inner = rewrite.applied(spec)
            if inner is None or any(inner == outer for _, outer in self.steps):
                return False
            left = self._against(rewrite, spec, inner)
            steps.append((rewrite, spec))
            spec = inner
        # Compare rules, not reasons: a rule that is broken with other numbers is still broken.
        is_taken = must_be or not rules_of(self.reasons) <= rules_of(left)
        if is_taken:
            self._take(steps, spec, left)
        return is_taken

    def _must_be_taken(self, rewrites: Collection[Rewrite]) -> bool | None:
        """True if dropout requires these rewrites, False if it forbids them, None otherwise."""
        if self.moves is None or not any(rewrite.moves_dropout for rewrite in rewrites):
            return None
        return all(rewrite.name in self.moves for rewrite in rewrites)

    def _is_too_late_for(self, rewrite: Rewrite) -> bool:
        """Whether the rewrite must not follow the steps that were taken."""
        if rewrite.may_fall_back and (self.steps or not self.terms.may_fall_back):
            return True  # a bias that another rewrite made is not worth examining
        if not rewrite.reads_lse or not self.spec.is_backward or self.spec.has("sinks"):
            return False
        # lse includes the sinks of an earlier call, which this call no longer has.
        return any(outer.has("sinks") for _, outer in self.steps)

    def _against(
        self, rewrite: Rewrite, spec: AttentionSpec, inner: AttentionSpec
    ) -> tuple[Reason, ...]:
        """The reasons against the inner call, and against the call beside it if there is one."""
        left = self.terms.reasons_against(inner)
        other = rewrite.beside(spec)
        if other is None:
            return left
        if other not in self.others:
            terms = replace(self.terms, may_fall_back=False, first=None)
            self.others[other] = rewritten(other, terms)
        return left + tuple(x for x in self.others[other].reasons if x not in left)

    def _take(self, steps: Sequence[Step], spec: AttentionSpec, left: tuple[Reason, ...]) -> None:
        self.steps += steps
        self.spec, self.reasons = spec, left
        # Of two calls that break equally many rules, the later one counts as nearer.
        if len(rules_of(left)) <= len(rules_of(self.nearest[1])):
            self.nearest = len(self.steps), left
