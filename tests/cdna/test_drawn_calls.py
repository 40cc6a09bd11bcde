"""Drawn calls that ASM kernels of both generations run, executed whole, against float64."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import pytest

from tests.support.cdna import generations
from tests.support.cdna.drawn_calls import drawn_run
from tests.support.cdna.kernel_runs import outcome_of
from tests.support.extent import in_soak, number_of_draws

pytestmark = in_soak
FIRST_SEED = int(os.environ.get("ATTN_DISPATCH_TEST_SEED", "20270501"))


@pytest.mark.parametrize("arch", generations.ARCHS)
@pytest.mark.parametrize("generation", generations.GENERATIONS)
def test_drawn_calls_are_right(generation: str, arch: str):
    """With NaN in padding and in what must be written, and no access outside XLA's buffers."""
    if missing := generations.missing(generation):
        pytest.skip(missing)
    wrong = {}
    for seed in range(FIRST_SEED, FIRST_SEED + number_of_draws(4, 2000)):
        run = drawn_run(generation, arch, seed)
        if problems := outcome_of(run, 1).problems:
            wrong[seed] = (problems, run.case.to_json())
    assert wrong == {}
