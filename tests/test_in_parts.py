"""Calls in parts of the batch and of the heads: results are those of the whole call."""

from __future__ import annotations

import os
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.conformance import draws
from attn_dispatch.conformance.case import Case
from attn_dispatch.conformance.reference import poison_padding
from attn_dispatch.core.rewrites import Chain, in_parts
from attn_dispatch.core.rewrites.in_parts import InParts, length_of
from test_rewrites import by_xla, specs_of

DRAWS = int(os.environ.get("ATTN_DISPATCH_TEST_DRAWS", "0")) or 60


def steps_of(spec: AttentionSpec, seed: int) -> tuple[InParts, ...]:
    """Parts of the batch, of the heads or of both, in either order; those that the call allows."""
    dice, steps = random.Random(seed), []
    for axis in dice.sample(("batch", "heads"), 2):
        whole = length_of(spec, axis)
        step = InParts(axis, dice.randint(1, max(whole - 1, 1)))
        inner = step.inner(spec)
        if inner is not None and dice.random() < 0.8:
            steps.append(step)
            spec = inner
    return tuple(steps)


def computed(spec: AttentionSpec, steps: Any, operands: Any) -> dict[str, Any]:
    chain = in_parts(Chain((), spec, ()), steps)
    results = chain.compute(operands, by_xla, by_xla)
    return dict(zip(spec.result_names, results, strict=True))


def differ(spec: AttentionSpec, found: Any, expected: Any) -> list[str]:
    """The results that differ by more than the rounding of sums in another order."""
    tolerance = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3, "float64": 1e-12}[spec.dtype]
    wrong = []
    for name, x in expected.items():
        x, y = (np.asarray(z, np.float64) for z in (x, found[name]))
        most = np.abs(x[np.isfinite(x)]).max(initial=1)
        if not np.allclose(y, x, rtol=tolerance, atol=tolerance * most, equal_nan=True):
            wrong.append(name)
    return wrong


def judge(case: Case, seed: int) -> tuple[str, ...]:
    """Which axes the case was divided along, its results being right."""
    arrays = case.operands()
    forward, *backward = specs_of(case, needs_keep=case.dropout > 0)
    operands = {
        x: jnp.asarray(y) for x, y in poison_padding(forward.options, arrays, case.poison).items()
    }
    steps = steps_of(forward, seed)
    whole = by_xla(forward, operands)
    assert differ(forward, computed(forward, steps, operands), whole) == [], steps
    for spec in backward:
        cotangents = {x: jnp.asarray(y) for x, y in case.cotangents().items()}
        given = operands | cotangents | {"out": whole["out"], "lse": whole["lse"]}
        given = {x: given[x] for x in spec.options.operands}
        found, expected = computed(spec, steps, given), by_xla(spec, given)
        assert differ(spec, found, expected) == [], steps
    return tuple(x.axis for x in steps)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_drawn_calls(seed: int):
    (case,) = draws.examples(1, 50_000 + seed, draws.SMALL)
    judge(case, seed)
