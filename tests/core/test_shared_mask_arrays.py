"""Arrays of masks on several devices, and in programs compiled for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.sharded_mask_arrays import LAYOUTS, MASKS
from tests.support.made_arrays import KEEPS
from tests.support.module_report import report_of, report_with_cuda_plugin


@pytest.fixture(scope="module")
def sharded_report() -> Any:
    return report_of("tests.core.sharded_mask_arrays")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_devices_get_their_part_of_the_arrays(sharded_report, layout, mask):
    cell = sharded_report[f"{layout}|{mask}"]
    assert cell["error"] < 1e-5 and cell["made"] == []
    rows = {"batch by both": 1, "rows": 8}.get(layout, 2)
    assert cell["rows"] == [1 if mask == "causal" else rows]
    if layout != "rows":  # rows are exchanged into heads
        assert cell["collectives"] == ["all-reduce"]  # the sum of the loss


@pytest.fixture(scope="module")
def hoisted_report() -> Any:
    return report_with_cuda_plugin("tests.core.hoisted_mask_arrays")


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_a_gpu_makes_lists_once_outside_of_loops(hoisted_report, mask):
    without = hoisted_report[f"{mask}, no remat"]
    for keep in KEEPS:
        row = hoisted_report[f"{mask}, {keep}"]
        assert row["lists inside"] == 0
        assert row["lists outside"] == without["lists outside"]
        assert (row["lists outside"] == 0) == (mask == "causal")  # which are constants
        assert row["calls"].count("forward") == (1 if keep == "no remat" else 2)
        assert row["calls"].count("backward") == 1
    unbound = hoisted_report[f"{mask}, not bound"]
    assert unbound["lists inside"] > 0 == unbound["lists outside"]
