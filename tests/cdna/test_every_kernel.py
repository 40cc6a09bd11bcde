"""Every ASM kernel in AITER's tables is selected by a call, or has the reason why none does."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import pytest

from tests.support.cdna import generations
from tests.support.cdna.kernel_calls import (
    OURS,
    UNREACHABLE,
    calls_of,
    lifted_rules,
    unreachable,
    without_call_or_reason,
)
from tests.support.cdna.kernel_runs import outcome_of, runs
from tests.support.extent import in_soak

# Kernels with a known defect run here with a warning.
pytestmark = [
    in_soak,
    pytest.mark.filterwarnings("ignore::attn_dispatch.AttentionKernelWarning"),
]
EVERY_TABLE = pytest.mark.parametrize(
    "generation, arch",
    [(x, y) for x in generations.GENERATIONS for y in generations.ARCHS],
    ids=lambda x: str(x),
)


@pytest.fixture(autouse=True)
def _needs_sources(request: pytest.FixtureRequest) -> None:
    """Skip the test of a generation whose kernels are not here."""
    if missing := generations.missing(request.node.callspec.params["generation"]):
        pytest.skip(missing)


@EVERY_TABLE
def test_every_kernel_has_a_call_or_a_reason(generation: str, arch: str):
    table, found = generations.table(generation, arch), calls_of(generation, arch)
    assert len(table) > 100 and found.keys() <= set(table)
    assert without_call_or_reason(generation, arch, table) == []
    assert without_call_or_reason(generation, arch, [*table, "fwd_hd999"]) == ["fwd_hd999"]
    reasons = {x: unreachable(generation, arch, x) for x in table}
    assert not [x for x in found if reasons[x]], "a reason for a kernel that a call selects"
    here = {x for x in UNREACHABLE if generation in x.generations and arch in x.archs}
    assert here == set(reasons.values()) - {None}
    assert sum(choice == OURS for _, choice in found.values()) >= 18


@EVERY_TABLE
def test_rules_are_the_reason_for_kernels_that_no_call_selects(generation: str, arch: str):
    lifted = calls_of(generation, arch, lifted_rules(generation, arch))
    for kernel in generations.table(generation, arch):
        reason = unreachable(generation, arch, kernel)
        assert reason is None or bool(reason.rules) == (kernel in lifted), kernel


@EVERY_TABLE
def test_every_kernel_of_our_calls_is_right(generation: str, arch: str):
    """Under one order of events; tests/scripts/soak_cdna.py runs many."""
    ours = [run for run in runs(generation, arch) if run.choice == OURS]
    problems = {str(run): outcome_of(run, 1).problems for run in ours}
    assert {x: y for x, y in problems.items() if y} == {}
