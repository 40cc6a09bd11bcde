"""The report that tests/gpu/memcheck.py writes about its calls."""

import argparse
from typing import Any

import pytest

from tests.gpu import memcheck


@pytest.mark.parametrize("has_masks", [False, True])
def test_results_have_the_names_of_the_drawn_calls(
    has_masks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def clean(args: argparse.Namespace, index: int, name: str) -> dict[str, Any]:
        return {"case": name, "status": "passed", "errors": 0}

    arguments = ["memcheck.py", "--draws", "3", "--seed", "5", *["--masks"][:has_masks]]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(memcheck, "checked", clean)
    with pytest.raises(SystemExit, match="0"):
        memcheck.main()
    family = "masked_draw" if has_masks else "drawn"
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [f"{family}/5_{i}: passed, errors: 0" for i in range(3)]


def test_the_report_has_counts_and_the_unclean_calls():
    calls = [
        {"case": "a", "status": "passed", "errors": 0},
        {"case": "b", "status": "passed", "errors": 3},
        {"case": "c", "status": "refused", "errors": None},
        {"case": "d", "status": "unfinished", "errors": None},
    ]
    assert memcheck.kept({"seed": 4, "paged": ["a", "b"], "packed": ["c"]}, calls) == {
        "seed": 4,
        "paged": {"drawn": 2, "clean": 1},
        "packed": {"drawn": 1, "clean": 0},
        "clean": 1,
        "refused": 1,
        "not_clean": 1,
        "sanitizer_crashed_or_hung": 1,
        "unclean": [calls[1], calls[3]],
    }
