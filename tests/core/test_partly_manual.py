"""Calls in a shard_map over some mesh axes: along the others, kernels compute their own share."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.module_report import report_of


@pytest.fixture(scope="module")
def report() -> Any:
    return report_of("tests.core.partly_manual_calls")


def calls(found: Any) -> list[tuple[str, ...]]:
    """The shapes of query and key in the calls of one device, backward first."""
    pattern = re.compile(r"\(query float32(\[.*?\]), key float32(\[.*?\])")
    shapes = (pattern.search(x) for x in found["calls"])
    return [(x[1], x[2]) for x in shapes if x is not None]


@pytest.mark.parametrize(
    ("name", "backward", "forward"),
    [
        # Of [4, 16, 8, 8] each of four devices has a quarter.
        ("batch and heads", ("[2, 16, 4, 8]", "[2, 16, 2, 8]"), ("[2, 16, 4, 8]", "[2, 16, 2, 8]")),
        ("heads over both", ("[4, 16, 2, 8]", "[4, 16, 1, 8]"), ("[4, 16, 2, 8]", "[4, 16, 1, 8]")),
        # Two devices would share the gradients of a kv head: in the backward pass they split the
        # batch instead. With dropout both passes are split alike, as their mask must be the same.
        ("2 kv heads on 4", ("[2, 16, 4, 8]", "[2, 16, 1, 8]"), ("[4, 16, 2, 8]", "[4, 16, 1, 8]")),
        (
            "dropout, 2 kv heads",
            ("[2, 16, 4, 8]", "[2, 16, 1, 8]"),
            ("[2, 16, 4, 8]", "[2, 16, 1, 8]"),
        ),
        ("mask_mod", ("[2, 16, 4, 8]", "[2, 16, 2, 8]"), ("[2, 16, 4, 8]", "[2, 16, 2, 8]")),
        (
            "layers under remat",
            ("[2, 16, 4, 8]", "[2, 16, 4, 8]"),
            ("[2, 16, 4, 8]", "[2, 16, 4, 8]"),
        ),
        # The gradient of a bias would be summed over a split batch: heads are split instead.
        ("bias of batch 1", ("[4, 16, 4, 8]", "[4, 16, 2, 8]"), ("[2, 16, 8, 8]", "[2, 16, 4, 8]")),
    ],
)
def test_each_device_computes_its_share(
    report: Any, name: str, backward: tuple[str, str], forward: tuple[str, str]
):
    """Dropout masks and mods depend on the position of a device's part in the whole call."""
    found = report[name]
    assert found["error"] <= 1e-5
    assert calls(found) == [backward, forward]
    assert found["warned"] == []


def test_a_gradient_that_all_devices_share_warns_with_the_share(report: Any):
    found = report["bias of all heads"]
    assert found["error"] <= 1e-5
    assert calls(found) == [("[4, 16, 8, 8]", "[4, 16, 4, 8]"), ("[2, 16, 4, 8]", "[2, 16, 2, 8]")]
    (message,) = found["warned"]
    assert "each device computes all of the call, where 1/4 would be its share" in message
    assert "make the shard_map manual over all axes, or the others Explicit" in message


def test_gathered_keys_warn(report: Any):
    """Which of two axes of the same size splits an array is not known."""
    found = report["keys along their length"]
    assert found["error"] <= 1e-5
    (message,) = found["warned"]
    what = "key and value are sharded along their length by 'x or y' (2 devices)"
    assert what in message and "gathers 4.1 kB" in message


def test_kernels_get_the_calls_that_the_list_has(report: Any):
    found = report["kernels"]
    assert found["calls"] == found["listed"] and len(found["calls"]) == 2
    part = "one device's part, in a shard_map over 'cp' (2), split along "
    (share,) = found["shares"]
    assert share.startswith(part) and f"; backward: {part}" in share


def test_an_export_warns_that_devices_compute_the_same(report: Any):
    """It cannot hold the Python code that splits a call."""
    (message,) = report["kernels"]["warned of the export"]
    assert "attention is exported from a program sharded along Auto mesh axes" in message
    assert "all 4 devices along 'x', 'y' compute the same" in message
    assert "inside a shard_map over all axes, each device keeps its share" in message
