"""The report that tests/gpu/memcheck.py writes about its calls."""

import argparse
from typing import Any

import pytest

from tests.gpu import memcheck


@pytest.mark.parametrize(
    ("flags", "family"), [([], "drawn"), (["--masks"], "masked_draw"), (["--wide"], "wide_draw")]
)
def test_results_have_the_names_of_the_drawn_calls(
    flags: list[str],
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def clean(args: argparse.Namespace, index: int, name: str) -> dict[str, Any]:
        return {"case": name, "status": "passed", "errors": 0}

    monkeypatch.setattr("sys.argv", ["memcheck.py", "--draws", "3", "--seed", "5", *flags])
    monkeypatch.setattr(memcheck, "checked", clean)
    with pytest.raises(SystemExit, match="0"):
        memcheck.main()
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


def test_the_checked_process_draws_the_same_calls(monkeypatch: pytest.MonkeyPatch):
    """The process under the sanitizer gets every option by which calls are drawn."""
    commands: list[tuple[str, ...]] = []

    class Finished:
        returncode = 0

        def __init__(self, command: tuple[str, ...], **_: object):
            commands.append(command)

        def communicate(self, timeout: float) -> tuple[str, None]:
            return "STATUS failed\nFAILED out: 2\n========= ERROR SUMMARY: 0 errors", None

    monkeypatch.setattr(memcheck.subprocess, "Popen", Finished)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    memcheck.devices.cache_clear()
    for masks, wide in ((False, False), (True, False), (False, True)):
        given = argparse.Namespace(
            implementation="fa4", masks=masks, wide=wide, draws=4, seed=7, one=None
        )
        found = memcheck.checked(given, 2, "x")
        assert (found["errors"], found["failures"]) == (0, ["out: 2"])
        [command] = commands
        commands.clear()
        assert ("--masks" in command, "--wide" in command) == (masks, wide)
    memcheck.devices.cache_clear()
