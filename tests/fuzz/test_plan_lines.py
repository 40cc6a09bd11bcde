"""Drawn lines of stored plans give the plan that was made, or are refused."""

from __future__ import annotations

from tests.fuzz.child import DRAWS, outcomes
from tests.support.backend import needs_cudnn


@needs_cudnn
def test_drawn_lines_give_the_plan_or_are_refused():
    counts = outcomes("tests.fuzz.plan_lines", range(DRAWS or 200), seconds=20.0)
    assert counts["the plan"] and counts["a damaged plan"] and counts["the plan of another call"]
    assert counts["expected a plan as a line of JSON and digits"]
    assert counts["the plan, from JSON written otherwise"]
