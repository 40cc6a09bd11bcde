"""Drawn calls, each with a rewrite that it does not need.

Most rewrites are only needed where the kernels of other GPUs, or of another vendor, refuse a call.
But each must be exact for any call, so that it can be tested wherever there are kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax

from attn_dispatch.call.options import backward_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import ONE_BY_ONE, REWRITES
from attn_dispatch.core.rewrites.mods_as_arrays import SUM_AS_BIAS
from attn_dispatch.core.rewrites.narrow_bias import NARROW_BIAS
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options

_TRIED = (*REWRITES, *ONE_BY_ONE)


def each_rewrite(cases: Sequence[Case]) -> list[Case]:
    """The cases, each with that rewrite which applies to it and has been used least.

    For SUM_AS_BIAS the case's score_mod is replaced by a sum, because drawn score_mods seldom are.
    """
    used: Counter[str] = Counter({rewrite.name: 0 for rewrite in _TRIED})
    return [_with_least_used(case, used) for case in cases]


def _with_least_used(case: Case, used: Counter[str]) -> Case:
    as_sum = _as_a_sum(case)
    calls, sums = tuple(calls_of(case)), tuple(calls_of(as_sum))
    fitting = [
        rewrite
        for rewrite in _TRIED
        if any(map(rewrite.applied, sums if rewrite is SUM_AS_BIAS else calls))
    ]
    if not fitting:
        return case
    rewrite = min(fitting, key=lambda x: used[x.name])
    used[rewrite.name] += 1
    # Every other bias fits into 16 bits exactly.
    is_rounded = rewrite is NARROW_BIAS and used[rewrite.name] % 2 == 0
    given = as_sum if rewrite is SUM_AS_BIAS else case
    return replace(given, rewrite=rewrite.name, rounded_bias=is_rounded)


def _as_a_sum(case: Case) -> Case:
    if not case.score_mod:
        return case
    step = Step("r tanh((t - s) / 16)", 0, 0, 1.0, 8, "s")
    changed = replace(case, score_mod=(step,), wanted=())
    wanted = tuple(x for x in case.wanted if x in changed.differentiable)
    return replace(changed, wanted=wanted)


def calls_of(case: Case) -> Iterator[AttentionSpec]:
    """The forward call, with its dropout mask if there is one, and the backward call."""
    forward = case.forward_options(needs_keep=case.dropout > 0)
    avals = case.avals()
    if case.page:
        avals = jax.eval_shape(partial(in_pages, case), avals)
        forward = paged_options(case, forward)
    spec = spec_of(forward, avals)
    yield spec
    if case.gradients:
        backward = backward_options(forward, case.gradients, has_lse_grad=case.lse_grad)
        yield spec.backward(backward)
