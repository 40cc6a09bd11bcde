"""Along Auto mesh axes the list has the calls that devices get when XLA partitions the program."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.module_report import report_of


@pytest.fixture(scope="module")
def report() -> Any:
    return report_of("tests.whole_programs.partitioned_programs")


@pytest.mark.parametrize(
    ("layout", "query", "share"),
    [
        ("data", [2, 16, 8, 4], "split along 'x' (4); all devices along 'y' (2) compute the same"),
        ("FSDP", [1, 16, 8, 4], "split along 'x' (4), 'y' (2)"),
        ("tensor", [8, 16, 4, 4], "split along 'y' (2); all devices along 'x' (4)"),
        ("data and tensor", [2, 16, 4, 4], "split along 'x' (4), 'y' (2)"),
        ("tensor over both axes", [8, 16, 1, 4], "split along 'x' (4), 'y' (2)"),
        # Three quarters are elsewhere of query, key, value and out, 2,048 bytes each, and of lse.
        ("sequence", [4, 16, 2, 4], "along 'x' (4); receives 6.53 kB forward and 9.6 kB backward"),
        # And of 8,192 bytes of key and of value.
        ("keys along their length", [4, 16, 8, 4], "receives 12.3 kB forward and 12.3 kB backward"),
        ("whole", [8, 16, 8, 4], "all devices along 'x' (4), 'y' (2) compute the same"),
        ("model", [2, 16, 4, 4], "split along 'x' (4), 'y' (2)"),
    ],
)
def test_the_list_has_the_calls_of_the_partitioned_program(
    report: Any, layout: str, query: list[int], share: str
):
    found = report[layout]
    assert found["listed"] == found["partitioned"] and len(found["listed"]) == 2
    assert all(f"(query float32{query}" in call for call in found["listed"])
    assert len(found["share"]) == 1 and share in found["share"][0]
    if "explained" in found:  # `explain` of the call's arrays
        assert found["explained"][0] in found["partitioned"]
        # The program has the gradient of query alone.
        split, listed = (
            x.partition("; receives")[0] for x in (found["explained"][1], *found["share"])
        )
        assert split == listed


def test_the_mesh_need_not_exist(report: Any):
    assert report["model"]["elsewhere"] == report["model"]["listed"]


def test_each_part_of_a_program_says_how_it_is_split(report: Any):
    found = report["mixed"]
    by_formula = [x for x in found["listed"] if "forward-mode derivative" in x]
    assert len(by_formula) == 1
    assert {*found["partitioned"]} == {*found["listed"]} - {*by_formula}
    assert found["share"] == [
        # No kernel runs it, and XLA splits its own operations.
        "one device's part, in a shard_map over 'x' (4): how XLA splits it along 'y' (2) is not "
        "known",
        "one device's part, split along 'x' (4), 'y' (2)",
        "all of it; XLA splits the operations of the formula",
    ]
