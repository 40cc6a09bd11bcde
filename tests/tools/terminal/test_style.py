"""The look of the output of commands: tables, and colours that do not change the text."""

from __future__ import annotations

import io
import re
import sys

import pytest

from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.report import Report
from attn_dispatch_tools.verify.screen import show as show_report

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
HEAD = ["family", "passed", "worst"]
ROWS = [["plain", "39", "0.26"], ["a longer one", "", "0.1"], ["all", "39", "0.26"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A function that makes stdout a terminal. Tests call it, since pytest replaces stdout."""
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def make() -> Terminal:
        monkeypatch.setattr(sys, "stdout", shown := Terminal())
        return shown

    return make


def test_a_table_has_aligned_columns_and_rules(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rule = "-" * 27
    expected = [
        "family        passed  worst",
        rule,
        "plain             39   0.26",
        "a longer one            0.1",
        rule,
        "all               39   0.26",
    ]
    assert style.table(HEAD, ROWS, has_sum=True).splitlines() == expected
    del expected[4]
    assert style.table(HEAD, ROWS).splitlines() == expected


def test_a_table_that_is_too_wide_becomes_a_list(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [[f"{x[0]} and more words", *x[1:]] for x in ROWS]
    text = style.table(HEAD, rows)
    assert max(map(len, text.splitlines())) <= 40
    assert text.splitlines()[:3] == [
        "plain and more words", "  passed  39", "  worst   0.26",
    ]  # fmt: skip


TEXT = "head\n  xla  usable " + "word " * 40 + "\n  [bold]no[/bold]: markup"
MARKS = {r"(?m)^head$": style.HEADING, r"xla +(usable)": style.GOOD}


def test_colours_do_not_change_words_or_lines(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = terminal()
    style.show(TEXT, MARKS)
    shown = out.getvalue()
    assert ESCAPES.sub("", shown) == f"{TEXT}\n"
    assert "\x1b[1mhead" in shown and "\x1b[32musable" in shown


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_switched_off(terminal, monkeypatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    out = terminal()
    style.show(TEXT, MARKS)
    shown = out.getvalue()
    if name == "NO_COLOR":  # NO_COLOR allows bold
        shown = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert shown == f"{TEXT}\n"


def test_a_pipe_gets_no_escape_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    style.show(TEXT, MARKS)
    assert capsys.readouterr().out == f"{TEXT}\n"


@pytest.mark.parametrize(
    ("status", "style"), [("passed", "\x1b[32mall "), ("failed", "\x1b[1;31mall ")]
)
def test_the_sum_of_a_run_is_red_if_a_case_failed(terminal, status, style: str):
    outcome = Outcome("a/b", "a", status, errors={"out": 1.0}, allowances={"out": 2.0})
    out = terminal()
    show_report(Report({"device": "cpu"}, "xla", {}, (outcome,), 1.0))
    assert style in out.getvalue()
