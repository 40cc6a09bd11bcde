"""Calls whose sequences are spread over eight devices equal those of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.context.spread_cases import CASES
from tests.support.module_report import report_of

TOLERANCE = 1e-5
"""The allowed error, as a share of the largest number of an array: shards sum in another order."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.core.context.spread_cases")


@pytest.mark.parametrize("name", CASES)
def test_results_and_derivatives_equal_those_of_one_device(report, name):
    assert "failed" not in report[name], report[name]["failed"]
    assert {x: y for x, y in report[name]["errors"].items() if not y <= TOLERANCE} == {}


@pytest.mark.parametrize("name", CASES)
def test_named_strategy_runs(report, name):
    ran, first = report[name].get("strategies", ()), name.split(",")[0].split()[0]
    if first in ("ring", "gather", "halo", "keys"):
        assert set(ran) == {first}
    elif first == "heads":
        assert set(ran) == ({"ring"} if "ring" in name else set())


def test_ids_of_documents_are_sent_once_and_nothing_is_gathered(report):
    sent = report["ring, documents, GQA"]["collectives"]
    keys_and_values, gradients = 2 * 3, 2 * 3
    # Before JAX 0.12 the compiler for CPUs sends keys once for both passes.
    times = 2 if sent["collective-permute"] > 1 + keys_and_values + gradients else 1
    permutes = 1 + times * keys_and_values + gradients
    assert sent == {"all-reduce": 1, "collective-permute": permutes}


def test_keys_of_a_cache_are_attended_to_where_they_are(report):
    sent = report["keys, one query"]["collectives"]
    assert not {"all-gather", "collective-permute", "all-to-all"} & sent.keys()
    assert "all-gather" in report["gathered keys, three queries"]["collectives"]
