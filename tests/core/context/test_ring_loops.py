"""A ring over many devices is a loop: right, and not longer for more devices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.context.ring_loops import CASES
from tests.support.module_report import report_of


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.core.context.ring_loops", devices=16)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_equal_those_of_one_device(report, name: str):
    assert set(report["cases"][name]["strategies"]) == {"ring"}
    assert {x: y for x, y in report["cases"][name]["errors"].items() if not y <= 1e-5} == {}


def test_programs_for_more_devices_are_not_longer(report):
    lengths = report["lengths"]
    assert lengths["12"] == lengths["16"] < lengths["8"]
    assert lengths["4"] < lengths["8"]  # so few steps are written out
