"""Paged calls whose pool is spread over eight devices equal those of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.context.spread_pages import DRAWS, cases
from tests.support.module_report import report_of

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.core.context.spread_pages")


def test_drawn_calls_equal_those_of_one_device(report):
    drawn = report["drawn"]
    assert len(drawn) == DRAWS
    assert [x["failed"] for x in drawn if "failed" in x] == []
    assert [x for x in drawn if not max(x["errors"]) <= TOLERANCE] == []


def test_drawn_calls_are_of_all_kinds(report):
    drawn = report["drawn"]
    for is_of_kind in (
        lambda x: x["kind"] == "Auto",
        lambda x: x["kind"] == "Explicit",
        lambda x: x["is_cut"] and not x["is_crowded"],
        lambda x: x["is_crowded"],
        lambda x: bool(x["invalid"]),
    ):
        assert sum(map(is_of_kind, drawn)) >= 3


def test_rows_that_are_invalid_are_nan_and_no_others(report):
    assert [x for x in report["drawn"] if x["nan"] != x["invalid"]] == []


def test_devices_exchange_results_alone(report):
    """The largest lse, and then weights and weighted results."""
    for call in report["drawn"]:
        assert list(call["exchanged"]) == ["all-reduce"]
        rows, results = sorted(call["exchanged"]["all-reduce"])
        assert results == rows * (1 + call["dims"])


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", cases())
def test_other_forms_equal_those_of_one_device_too(report, name: str, kind: str):
    found = report["cases"][name]
    assert "failed" not in found, found["failed"]
    assert found[kind]["error"] <= TOLERANCE
    if not name.startswith("gathered"):
        assert list(found[kind]["exchanged"]) == ["all-reduce"]
        assert found[kind]["warnings"] == []


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("many queries", "each of several causal queries reads the pages by itself, at most 16, "
         "not 18"),
        ("window", "a window or ALiBi counts over the pages of all devices"),
        ("ALiBi", "a window or ALiBi counts over the pages of all devices"),
        ("score_mod", "with score_mod, keys are gathered"),
        ("heads", 'context_parallel is "heads"'),
        ("few pages", "results that devices would sum, 9.22 kB, are no less than the keys"),
    ],
)  # fmt: skip
def test_gathered_pages_warn_and_say_why(report, name: str, why: str, kind: str):
    (message,) = report["cases"][f"gathered, {name}"][kind]["warnings"]
    assert (
        "key_pages and value_pages are sharded along the number of pages by 'a' (4 devices)"
        in message
    )
    assert f"in every call ({why})" in message
