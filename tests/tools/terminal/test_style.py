"""How what commands print looks: tables, and colours that change no word."""

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
    """Makes stdout a terminal; from within a test, as pytest sets stdout anew for it."""
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def made() -> Terminal:
        monkeypatch.setattr(sys, "stdout", shown := Terminal())
        return shown

    return made


def test_a_table(monkeypatch):
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


def test_a_table_that_is_too_wide_cuts_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [[f"{x[0]} and more words", *x[1:]] for x in ROWS]
    text = style.table(HEAD, rows)
    assert max(map(len, text.splitlines())) <= 40
    assert text.splitlines()[:3] == [
        "plain and more words", "  passed  39", "  worst   0.26",
    ]  # fmt: skip


TEXT = "head\n  xla  usable " + "word " * 40 + "\n  [bold]no[/bold]: markup"
MARKS = {r"(?m)^head$": style.HEADING, r"xla +(usable)": style.GOOD}


def test_colours_change_no_word_and_break_no_line(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = terminal()
    style.show(TEXT, MARKS)
    shown = out.getvalue()
    assert ESCAPES.sub("", shown) == f"{TEXT}\n"
    assert "\x1b[1mhead" in shown and "\x1b[32musable" in shown


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_where_no_colours_are_wanted(terminal, monkeypatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    out = terminal()
    style.show(TEXT, MARKS)
    shown = out.getvalue()
    if name == "NO_COLOR":  # bold is no colour
        shown = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert shown == f"{TEXT}\n"


def test_in_a_pipe_there_are_no_escapes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    style.show(TEXT, MARKS)
    assert capsys.readouterr().out == f"{TEXT}\n"


@pytest.mark.parametrize(
    ("status", "style"), [("passed", "\x1b[32mall "), ("failed", "\x1b[1;31mall ")]
)
def test_the_sum_of_a_run_is_red_where_something_is_wrong(terminal, status, style: str):
    outcome = Outcome("a/b", "a", status, errors={"out": 1.0}, allowances={"out": 2.0})
    out = terminal()
    show_report(Report({"device": "cpu"}, "xla", {}, (outcome,), 1.0))
    assert style in out.getvalue()
