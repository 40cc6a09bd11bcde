"""Spread calls with AITER's handlers on its emulator equal those of XLA on one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.context.spread_on_aiter import ARCHS
from tests.support.module_report import report_of

TOLERANCE = 0.01
"""The allowed error, as a share of the largest number of an array, of results in 16 bits."""
LSE_TOLERANCE = 1e-5

PIECES = {
    "ring, zigzag, GQA": 4 * 4,
    "ring, packed": 4 * 2,
    "ring, documents": 4 * 2,
    "gather, bias": 4 * 2,
    "halo": 4,
    "halo, packed": 4,
    "heads": 4,
    "keys, one query": 4,
    "ring, ASM": 2 * 2,
}
"""The kernel calls of all devices in each pass."""

RUNS = [(x, arch) for x, archs in ARCHS.items() for arch in archs]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.core.context.spread_on_aiter", devices=4)


@pytest.mark.parametrize(("name", "arch"), RUNS)
def test_results_and_gradients_equal_those_of_xla(report, name: str, arch: str):
    found = report[name][arch]
    assert "failed" not in found, found["failed"]
    wrong = {
        x: error
        for x, error in found["errors"].items()
        if not error <= (LSE_TOLERANCE if "lse" in x else TOLERANCE)
    }
    assert wrong == {}


@pytest.mark.parametrize(("name", "arch"), RUNS)
def test_every_piece_is_a_call_of_aiter(report, name: str, arch: str):
    found, strategy = report[name][arch], name.split(",")[0]
    forward = "split_kv" if strategy == "keys" else "forward"
    assert found["calls"] == {forward: PIECES[name], "backward": PIECES[name]}
    assert set(found["strategies"]) == (set() if strategy == "heads" else {strategy})
    assert found["is_asm"] == ("ASM" in name)
