"""A segment longer than max_segment_len over devices: its rows are NaN or right, never wrong. Rows
of wrong lengths are NaN."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.context.long_segments import CASES, DEVICES
from tests.support.module_report import report_of

NAN = {
    "ring, unnoticed": {},
    "ring": {"2": 16},
    "ring, full": {"2": 32},
    "ring, documents": {"2": 32},
    "gather": {"2": 24, "3": 8},
    "halo": {"2": 24, "3": 8},
}
"""The rows that are NaN, by id."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.core.context.long_segments", devices=DEVICES)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_nan_or_right_and_no_gradient_is_nan(report, name: str):
    assert {x: y for x, y in report["segments"][name]["errors"].items() if not y <= 1e-5} == {}
    assert report["segments"][name]["nan"] == NAN[name]


def test_wrong_lengths_are_found_over_devices(report):
    assert report["lengths"] == dict.fromkeys(report["lengths"], True)
    assert len(report["lengths"]) == 2
