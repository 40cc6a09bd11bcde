"""The rewrites: calls that a vendor's kernels refuse, said by others that they run, exactly.

Whoever refuses a call is asked about it again, rewritten: in the order of the list, each rewrite
that takes away a reason is kept, and again, until none does: what one makes may be another's
business. A few are taken where there is no reason either, because kernels do less then. None goes
back to a call that was left: two could undo each other for ever. What is left without a reason
runs, and `explain` says by which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from attn_dispatch.call.options import backward_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.apart import GradientApart, MaximumApart, ReadGradientsApart
from attn_dispatch.core.rewrites.cache.beside_pages import BesidePages
from attn_dispatch.core.rewrites.cache.few_queries import QueriesAsHeads
from attn_dispatch.core.rewrites.cache.gathered import PagesGathered
from attn_dispatch.core.rewrites.cache.grouped_heads import HeadsAsQueries
from attn_dispatch.core.rewrites.cache.near_keys import NearKeys
from attn_dispatch.core.rewrites.cache.smaller_pages import SmallerPages
from attn_dispatch.core.rewrites.cache.whole_pages import WholePages
from attn_dispatch.core.rewrites.dense import BandAsMask, MaskAsBias, SequencesAsMask, SlopesAsBias
from attn_dispatch.core.rewrites.dropout_keys import CallForEachKey
from attn_dispatch.core.rewrites.empty import NoScores
from attn_dispatch.core.rewrites.in_parts import InParts
from attn_dispatch.core.rewrites.large import parts_of_a_large_call
from attn_dispatch.core.rewrites.mask_as_lengths import MaskModAsLengths
from attn_dispatch.core.rewrites.mask_from_out import MaskFromOut
from attn_dispatch.core.rewrites.mods_as_arguments import ScoreModAsCap, ScoreModAsSlopes
from attn_dispatch.core.rewrites.mods_as_arrays import MaskModAsMask, SumAsBias
from attn_dispatch.core.rewrites.narrow_bias import NarrowBias
from attn_dispatch.core.rewrites.one_diagonal import OneDiagonal
from attn_dispatch.core.rewrites.padded import PackedAsPadded
from attn_dispatch.core.rewrites.rewrite import (
    Arrays,
    Calls,
    Compute,
    ForAnother,
    InTwo,
    Rewrite,
    forward_of,
)
from attn_dispatch.core.rewrites.row_bias import RowBias
from attn_dispatch.core.rewrites.sinks import SinksAfterwards
from attn_dispatch.core.rewrites.value_columns import ValueColumns
from attn_dispatch.core.rewrites.wide_heads import WiderHeads
from attn_dispatch.reason import Reason, rules_of

_OF_THE_CALLERS_BIAS = NarrowBias()
_GO_BY_LSE = (GradientApart, ReadGradientsApart, RowBias)

_OF_A_CACHE: tuple[Rewrite, ...] = (
    NearKeys(),
    WholePages(),
    HeadsAsQueries(),
    QueriesAsHeads(),
)

_FOR_DECODING: tuple[Rewrite, ...] = (
    SinksAfterwards(is_beside_cache=True),
    BesidePages(ScoreModAsCap()),
    BesidePages(SumAsBias()),
    BesidePages(SlopesAsBias()),
    *_OF_A_CACHE,
)

_PREFERRED: tuple[Rewrite, ...] = (MaskModAsLengths(),)

_FROM_THE_TOP_LEFT: tuple[Rewrite, ...] = (OneDiagonal(),)

REWRITES: tuple[Rewrite, ...] = (
    *_PREFERRED,
    *_FROM_THE_TOP_LEFT,
    _OF_THE_CALLERS_BIAS,
    NoScores(),
    CallForEachKey(),
    MaskFromOut(),
    ScoreModAsCap(),
    ScoreModAsSlopes(),
    GradientApart("alibi_slopes"),
    SumAsBias(),
    GradientApart("bias"),
    ReadGradientsApart(),
    RowBias(),
    SinksAfterwards(),
    *_OF_A_CACHE,
    SmallerPages(),
    PagesGathered(),
    MaximumApart(),
    SlopesAsBias(),
    BandAsMask(),
    PackedAsPadded(),
    SequencesAsMask(),
    MaskModAsMask(),
    MaskAsBias(),
    WiderHeads("head dim: padded to 256", head_dim=256),
    WiderHeads("value dim: padded to the head dim", is_value_as_wide=True),
    ValueColumns(256),
    ValueColumns(128),
)
"""Those that cost least first, and before those that need what they make."""

ONE_BY_ONE: tuple[Rewrite, ...] = (InParts("batch", 1), InParts("heads", 1))
"""What `Settings.first_rewrite` may be as well. Parts of other sizes are chosen for a call."""

Reasons = Callable[[AttentionSpec], tuple[Reason, ...]]


def preferred(
    *, has_decoding_kernel: bool, skips_from_bottom_right: bool = True
) -> tuple[Rewrite, ...]:
    """Those that are taken wherever they bring no reason: with them kernels do less."""
    for_windows = () if skips_from_bottom_right else _FROM_THE_TOP_LEFT
    return _PREFERRED + for_windows + (_FOR_DECODING if has_decoding_kernel else ())


Step = tuple[Rewrite, AttentionSpec]


@dataclass(frozen=True)
class Chain:
    """The rewrites that bring a call to the kernel, each with the call that it rewrites."""

    steps: tuple[Step, ...]
    """And of one that wants another call beside its inner one how that goes: `beside`."""
    spec: AttentionSpec
    """The call that the kernel is asked for."""
    reasons: tuple[Reason, ...]
    """Why it does not run that one either."""
    beside: tuple[tuple[AttentionSpec, Chain], ...] = ()
    """The calls that some of the rewrites want beside."""
    undivided: AttentionSpec | None = None
    """The last call before the limit on scratch memory divided it, if it did."""
    limit: str = ""
    """What the limit did, if anything."""
    nearest: tuple[int, tuple[Reason, ...]] = (0, ())
    """After how many of the steps the call breaks the fewest rules, and what speaks against it
    there; the last such call, of a chain that ends with reasons."""

    @property
    def first(self) -> AttentionSpec:
        """The call that was rewritten."""
        return self.steps[0][1] if self.steps else self.spec

    @property
    def may_fall_back(self) -> bool:
        """Whether it is decided when the call runs that XLA computes it after all."""
        return any(rewrite is _OF_THE_CALLERS_BIAS for rewrite, _ in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rewrite.name for rewrite, _ in self.steps))

    def compute(self, operands: Arrays, kernel: Compute, xla: Compute) -> tuple[jax.Array, ...]:
        """The results of the call that was rewritten, in order."""
        results = self._step(0, operands, kernel, xla)
        return tuple(results[name] for name in self.first.result_names)

    def _step(self, i: int, operands: Arrays, kernel: Compute, xla: Compute) -> Arrays:
        if i == len(self.steps):
            return dict(kernel(self.spec, operands))
        rewrite, spec = self.steps[i]

        def beside(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Arrays:
            chain = dict(self.beside)[spec]
            results = chain.compute(dict(operands), kernel, xla)
            return dict(zip(spec.result_names, results, strict=True))

        inner = Calls(lambda _, x: self._step(i + 1, dict(x), kernel, xla), xla, beside)
        results = rewrite.compute(spec, operands, inner)
        return {name: results[name] for name in spec.result_names}


Parts = Callable[[Sequence[Chain]], tuple[InParts, ...]]
"""In which parts a kernel is asked for the calls that it runs by these chains, in the same parts
for all of them; () is as they are."""


def rewritten(
    spec: AttentionSpec,
    reasons_against: Reasons,
    *,
    preferred: Sequence[Rewrite] = (),
    parts: Parts = lambda chains: (),
    may_fall_back: bool = True,
    first: str | None = None,
) -> Chain:
    """The call as far as rewrites bring it: without a reason against it, if there is a way.

    Args:
      spec: the call.
      reasons_against: why the implementation does not run a call, of this direction alone.
      preferred: those that are taken without a reason.
      parts: in which parts the kernel is asked for what it runs.
      may_fall_back: whether XLA may compute the call after all, as is decided when it runs.
      first: the name of one that is taken whether or not there is a reason.
    """
    chain_of = partial(
        _chain,
        reasons_against=reasons_against,
        preferred=preferred,
        parts=parts,
        may_fall_back=may_fall_back,
        first=first,
    )
    if not spec.meaning.dropout_rate:
        chain = chain_of(spec, moves=None)
        return chain if chain.reasons else in_parts(chain, parts([chain]))
    # Where the mask is drawn is decided by one call, for both directions and for whoever wants to
    # see the mask; and so are parts, by that call with all its gradients.
    forward = forward_of(spec)
    first_chain = chain_of(forward, moves=None)
    moves = frozenset(x.name for x, _ in first_chain.steps if x.moves_dropout)
    chain = chain_of(spec, moves=moves)
    if chain.reasons:
        return chain
    wanted = forward.options.differentiable
    backward = forward.backward(backward_options(forward.options, wanted, has_lse_grad=False))
    both = (first_chain, chain_of(backward, moves=moves))
    return in_parts(chain, parts([x for x in both if not x.reasons]))


def in_parts(chain: Chain, steps: Sequence[InParts]) -> Chain:
    """The chain with its last call in parts, if any, each divided further as the next one says."""
    spec, taken, beside = chain.spec, list(chain.steps), dict(chain.beside)
    for i, step in enumerate(steps):
        inner = step.inner(spec)
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
        last, outer = merged[-1] if merged else (None, spec)
        if (
            isinstance(step, InParts)
            and isinstance(last, InParts)
            and step.axis == last.axis
            and step.inner(outer) == step.inner(spec)
            and step.beside(outer) is None
        ):
            merged[-1] = (step, outer)
        else:
            merged.append((step, spec))
    return tuple(merged)


def _chain(
    spec: AttentionSpec,
    *,
    reasons_against: Reasons,
    preferred: Sequence[Rewrite],
    parts: Parts,
    may_fall_back: bool,
    first: str | None,
    moves: frozenset[str] | None,
) -> Chain:
    """With exactly these of the rewrites that move dropout, unless None."""
    steps: list[tuple[Rewrite, AttentionSpec]] = []
    others: dict[AttentionSpec, Chain] = {}

    def reasons_of(
        rewrite: Rewrite, spec: AttentionSpec, inner: AttentionSpec
    ) -> tuple[Reason, ...]:
        """Against what a rewrite makes of a call."""
        left = reasons_against(inner)
        other = rewrite.beside(spec) if isinstance(rewrite, InTwo) else None
        if other is None:
            return left
        if other not in others:
            others[other] = rewritten(
                other, reasons_against, preferred=preferred, parts=parts, may_fall_back=False
            )
        return left + tuple(x for x in others[other].reasons if x not in left)

    for rewrite in (*REWRITES, *ONE_BY_ONE):
        inner = rewrite.inner(spec) if rewrite.name == first else None
        if inner is not None:
            reasons_of(rewrite, spec, inner)
            steps.append((rewrite, spec))
            spec = inner
    reasons, before = reasons_against(spec), -1
    nearest = len(steps), reasons
    for rewrite in preferred:
        inner = rewrite.inner(spec)
        if inner is None or not (moves is None or rewrite.name in moves):
            continue
        left = brought = reasons_of(rewrite, spec, inner)
        if isinstance(rewrite, ForAnother):
            if not reasons:
                continue
            last = rewrite.leads_to(spec)
            brought = left if last is None else reasons_against(last)
        if set(brought) <= set(reasons):
            steps.append((rewrite, spec))
            spec, reasons = inner, left
            nearest = _nearer(nearest, len(steps), reasons)
    while before < len(steps):
        before = len(steps)
        for parts_of_it in parts_of_a_large_call(spec):
            is_wanted = moves is not None and all(x.name in moves for x in parts_of_it)
            if not is_wanted and (moves is not None or not reasons):
                continue
            divided, inner, left = [], spec, ()
            for step in parts_of_it:
                divided.append((step, inner))
                outer, inner = inner, step.inner(inner)
                if inner is None:
                    break
                left = reasons_of(step, outer, inner)
            if inner is not None and (is_wanted or _takes_away(reasons, left)):
                steps += divided
                spec, reasons = inner, left
                nearest = _nearer(nearest, len(steps), reasons)
                break
        for rewrite in REWRITES:
            if rewrite is _OF_THE_CALLERS_BIAS and (steps or not may_fall_back):
                continue  # what another one made of it is not worth a look
            if isinstance(rewrite, _GO_BY_LSE) and _has_left_sinks_out(spec, steps):
                continue
            is_given = moves is not None and rewrite.moves_dropout
            is_wanted = is_given and moves is not None and rewrite.name in moves
            if not is_wanted and (is_given or not reasons):
                continue
            inner = rewrite.inner(spec)
            if inner is None or inner in (x for _, x in steps):
                continue
            left = reasons_of(rewrite, spec, inner)
            if is_wanted or _takes_away(reasons, left):
                steps.append((rewrite, spec))
                spec, reasons = inner, left
                nearest = _nearer(nearest, len(steps), reasons)
    return Chain(tuple(steps), spec, reasons, tuple(others.items()), nearest=nearest)


def _nearer(
    nearest: tuple[int, tuple[Reason, ...]], steps: int, reasons: tuple[Reason, ...]
) -> tuple[int, tuple[Reason, ...]]:
    """The one of two calls that breaks fewer rules: no more of them is nearer, too."""
    is_nearer = len(rules_of(reasons)) <= len(rules_of(nearest[1]))
    return (steps, reasons) if is_nearer else nearest


def _takes_away(before: Sequence[Reason], after: Sequence[Reason]) -> bool:
    """Whether a rule is broken no more. The same rule with other numbers is still broken."""
    return not rules_of(before) <= rules_of(after)


def _has_left_sinks_out(
    spec: AttentionSpec, steps: Sequence[tuple[Rewrite, AttentionSpec]]
) -> bool:
    """Whether lse is that of the call with sinks which it no longer has."""
    return (
        spec.is_backward and not spec.has("sinks") and any(outer.has("sinks") for _, outer in steps)
    )
