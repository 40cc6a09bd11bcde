"""Calls computed in parts of batch rows and heads give the whole call's results and gradients.

NumPy stands in for cuDNN, together with every other rewrite, against the float64 reference. XLA,
whose dropout mask depends on the position in the whole call, is compared with XLA's whole call.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import Chain, Terms, divided, rewritten
from attn_dispatch.core.rewrites.in_parts import _Division, _InParts, in_parts_of, length_of
from attn_dispatch.core.rewrites.rewrite import Rewrite
from attn_dispatch.semantics.invalid_values import without_nan_lse
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.compiling import COMPILE_QUICKLY
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.reference import poison_padding, reference
from tests.support.comparing import check, poisoned, to_jax
from tests.support.extent import number_of_draws
from tests.support.kernel_stand_ins import by_xla, kernel, kernel_reasons, specs_of
from tests.support.small_cases import with_max_segments

SEED = int(os.environ.get("ATTN_DISPATCH_TEST_SEED", "50000"))
DRAWS = number_of_draws(9)
DRAWS_BY_XLA = DRAWS // 3

NamedArrays = dict[str, Any]


def drawn(seed: int) -> Case:
    """A drawn call with any options and several batch rows, in float32."""
    (case,) = draws.examples(1, SEED + seed, draws.SMALL)
    scale = case.scale if abs(case.scale) > 1e-3 else 0.3
    case = replace(case, dtype="float32", bias_dtype="float32", score_shift=0.0, magnitude=1.0)
    return with_max_segments(replace(case, scale=scale))


def some_parts(specs: Sequence[AttentionSpec], seed: int) -> tuple[Rewrite, ...]:
    """Rewrites into parts of batch rows, heads or both, in either order, if all calls allow it."""
    rng, steps = random.Random(seed), []
    for axis in rng.sample(("batch", "heads"), 2):
        step = in_parts_of(axis, rng.randint(1, max(length_of(specs[0], axis) - 1, 1)))
        inner = [x for x in map(step.applied, specs) if x is not None]
        if len(inner) == len(specs) and rng.random() < 0.8:
            steps.append(step)
            specs = inner
    return tuple(steps)


def chain_of(spec: AttentionSpec, seed: int) -> Chain:
    """The chain with the rewrites that the call needs, and the kernel's call in parts."""
    parts = partial(some_parts, seed=seed)
    terms = Terms(
        lambda x: tuple(kernel_reasons(x)),
        choose_parts=lambda chains: parts([x.spec for x in chains]),
    )
    return rewritten(spec, terms)


def axes_of(chain: Chain) -> tuple[str, ...]:
    return tuple(x.parts.axis for x, _ in chain.steps if x.parts)


def judge(case: Case, seed: int, chain_of: Callable[..., Chain] = chain_of) -> set[str]:
    """Compare both directions by NumPy with the reference; return the axes that were divided."""
    operands, drops = case.operands(), case.dropout > 0
    forward, *backward = specs_of(case, needs_keep=drops)
    chain = chain_of(forward, seed)
    if chain.reasons:
        return set()
    found = set(axes_of(chain))

    def compute(chain: Chain, given: NamedArrays) -> tuple:
        program = partial(chain.compute, kernel=kernel, xla=by_xla)
        return jax.jit(program, compiler_options=COMPILE_QUICKLY)(given)

    results = compute(chain, to_jax(poison_padding(forward.options, operands)))
    keep = np.asarray(results[forward.result_names.index("keep")]) if drops else None
    exact = reference(forward.options, operands, keep)
    check(forward, results, exact)
    for spec in backward:
        chain = chain_of(spec, seed)
        if chain.reasons:
            continue
        found |= set(axes_of(chain))
        given = operands | case.cotangents()
        given |= {name: exact[name].astype(np.float32) for name in ("out", "lse")}
        results = compute(chain, without_nan_lse(spec, to_jax(poisoned(spec, given))))
        check(spec, results, reference(spec.options, given, keep))
    return found


@pytest.mark.parametrize("part", range(2))
def test_drawn_calls_in_parts_agree_with_the_reference(part: int):
    found = [judge(drawn(seed), seed) for seed in range(part, DRAWS, 2)]
    assert sum(map(bool, found)) > len(found) // 4


@pytest.mark.parametrize("part", range(2))
def test_drawn_calls_in_parts_agree_with_xlas_whole_call(part: int):
    """A part under dropout draws the mask of its place in the whole call."""
    for seed in range(part, DRAWS_BY_XLA, 2):
        case = drawn(seed)
        if seed % 4 < 2:
            case = replace(case, dropout=0.4, inference=False)
        forward, *_ = specs_of(case, needs_keep=case.dropout > 0)
        compare_with_whole(case, some_parts([forward], seed))


def compare_with_whole(case: Case, steps: Sequence[Rewrite]) -> None:
    """Compare XLA's results in parts with its whole call, in both directions."""
    forward, *backward = specs_of(case, needs_keep=case.dropout > 0)

    def both(spec: AttentionSpec, given: NamedArrays) -> tuple[Any, Any]:
        chain = divided(Chain((), spec, ()), steps)
        whole = tuple(by_xla(spec, given).values())
        return chain.compute(given, by_xla, by_xla), whole

    def compare(spec: AttentionSpec, given: NamedArrays) -> NamedArrays:
        run = jax.jit(partial(both, spec), compiler_options=COMPILE_QUICKLY)
        found, whole = run(given)
        for name, x, y in zip(spec.result_names, found, whole, strict=True):
            size = np.abs(y[np.isfinite(y)]).max(initial=1)
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * size, err_msg=f"{name} {steps}")
        return dict(zip(spec.result_names, whole, strict=True))

    operands = to_jax(poison_padding(forward.options, case.operands(), case.poison))
    whole = compare(forward, operands)
    for spec in backward:
        given = operands | to_jax(case.cotangents()) | whole
        compare(spec, {x: given[x] for x in spec.options.operands})


STEPS = (Step("x + r tanh((t - s) / 16)", 0, 0, 1.0, 8, "b"), Step("x r", 0, 0, 1.0, 8, "n"))
CASE = Case(
    "in_parts", b=5, n=6, k=2, t=6, s=7, bias=(1, 6, 6, 7), dropout=0.4, score_mod=STEPS, sinks=1,
    kv_lengths=(7, 3, 0, 6, 7), alibi=5, lse_grad=True,
)  # fmt: skip
WITH_OWN_ARRAYS = replace(
    CASE, b=6, own_arrays=True, transform="vmap", alibi=6, kv_lengths=(7, 3, 0, 6, 7, 2)
)
PARTS = (in_parts_of("batch", 2), in_parts_of("heads", 1))
ALL_OPERANDS: tuple[tuple[Case, tuple[Rewrite, ...]], ...] = (
    (CASE, PARTS),
    (CASE, (in_parts_of("heads", 3), in_parts_of("batch", 4))),
    (CASE, (in_parts_of("heads", 2),)),
    (WITH_OWN_ARRAYS, (in_parts_of("batch", 1),)),
    (WITH_OWN_ARRAYS, (in_parts_of("batch", 3), in_parts_of("heads", 3))),
)


@pytest.mark.parametrize(("case", "steps"), ALL_OPERANDS)
def test_parts_with_every_divided_or_shared_operand(case: Case, steps: tuple[Rewrite, ...]):
    compare_with_whole(case, [x for x in steps if x.applied(specs_of(case, needs_keep=True)[0])])


def _dropout_not_moved(self: Any, spec: AttentionSpec, name: str, first: Any) -> Any:
    return 0 if name == "dropout_start" else _MOVED(self, spec, name, first)


def _mods_not_moved(self: Any, spec: AttentionSpec, name: str, first: Any) -> Any:
    return 0 if name == "mods_start" else _MOVED(self, spec, name, first)


_MOVED, _MODULE = _InParts._moved, sys.modules[_InParts.__module__]
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "the same dropout for all parts": (_InParts, "_moved", _dropout_not_moved),
    "mods count from 0 in each part": (_InParts, "_moved", _mods_not_moved),
    "no rest": (_InParts, "rest", lambda self, spec: None),
    "no sums": (_InParts, "_is_summed", lambda self, spec, name: False),
    "sums in 16 bits": (
        sys.modules[_InParts.__module__],
        "_wide",
        lambda dtype: np.dtype(jnp.bfloat16),
    ),
    "another head": (_Division, "start", lambda self, first: first // self.rows * 0),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_division_changes_results(fault: str, monkeypatch):
    monkeypatch.setattr(*BROKEN[fault])
    with pytest.raises((AssertionError, TypeError, ValueError)):
        compare_with_whole(CASE, PARTS)
