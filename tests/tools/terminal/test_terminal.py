"""Shared parts of commands: progress with and without rich, pages, widths, help."""

from __future__ import annotations

import argparse
import base64
import builtins
import io
import re
import sys
from pathlib import Path

import pytest

from attn_dispatch.console import waiting
from attn_dispatch_tools.reports.html_page import page
from attn_dispatch_tools.terminal.help import add_command
from attn_dispatch_tools.terminal.progress import progress
from attn_dispatch_tools.terminal.text import width, wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def without(monkeypatch):
    """A function that makes the import of packages fail."""

    def missing(*names: str) -> None:
        real = builtins.__import__

        def imported(name, *args, **kwargs):
            if name.split(".")[0] in names:
                raise ImportError(name)
            return real(name, *args, **kwargs)

        for module in [x for x in sys.modules if x.split(".")[0] in names]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(builtins, "__import__", imported)

    return missing


def run(total: int = 4, **how) -> None:
    with progress("Cases", total, **how) as shown:
        for i in range(total):
            shown.print_line(f"[red] {i}", is_bad=i == 2)
            shown.step(f"{i + 1} passed")


PLAIN = (
    "[red] 0\n[red] 1\n2 of 4: 2 passed\n[red] 2\n[red] 3\n4 of 4: 4 passed\n"
)  # fmt: skip


def test_progress_in_a_pipe_prints_lines(capsys):
    run(every=2)
    assert capsys.readouterr() == (PLAIN, "")
    run(every=2, is_stderr=True)
    assert capsys.readouterr() == ("", PLAIN)


def test_progress_without_rich_prints_lines(monkeypatch, without):
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    without("rich")
    run(every=2)
    assert out.getvalue() == PLAIN
    monkeypatch.setattr(sys, "stderr", Terminal())
    with waiting("tuning") as say:
        say("this")


def test_progress_on_a_terminal_shows_a_bar(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    run(every=2)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "[red] 3" in plain, "text is not read as markup"
    assert "4/4" in plain and "4 passed" in plain and "of 4:" not in plain


def test_progress_follows_a_total_that_changes(capsys):
    with progress("Compiling", every=50) as shown:
        shown.at(7, 120, "a.cc")
        shown.at(100, 120, "b.cc")
        shown.at(120, 120, "c.cc")
    assert capsys.readouterr().out == "100 of 120: b.cc\n120 of 120: c.cc\n"


MARKDOWN = """\
# Attention on <H200>

A sentence with <script> in it.

| a | b |
|---|---:|
| 1 | **2** |

```
code <x>
```
"""


def test_a_page_contains_its_pictures_and_escapes_text(tmp_path: Path):
    pytest.importorskip("markdown_it")
    picture = tmp_path / "bars.svg"
    picture.write_text("<svg/>")
    text = page(MARKDOWN, [picture])
    assert "<title>Attention on &lt;H200&gt;</title>" in text and "<script>" not in text
    assert "<strong>2</strong>" in text and "<table>" in text and "code &lt;x&gt;" in text
    (where,) = re.findall(r'src="([^"]*)"', text)
    assert where == "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()
    assert not re.findall(r'(?:href|src)="(?!data:)', text)
    order = [text.index(x) for x in ("<h1>", "A sentence with", "<img", "<table>")]
    assert order == sorted(order), "the summary comes before the pictures"


def test_without_its_library_a_page_is_an_error(without):
    without("markdown_it")
    with pytest.raises(ModuleNotFoundError, match="pip install rich"):
        page("# a")


@pytest.mark.parametrize(
    ("columns", "expected"), [(None, 80), ("20", 40), ("90", 90), ("300", 100)]
)
def test_the_width_is_40_to_100_columns(monkeypatch, columns, expected: int):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert width() == expected


def test_wrapped_lines_are_indented_and_words_stay_whole():
    assert wrapped("x  ", "one two three", 8) == ["x  one", "   two", "   three"]
    assert wrapped("", "/a/very/long/path-of-one", 10) == ["/a/very/long/path-of-one"]


@pytest.mark.parametrize(
    "command",
    [
        "pip install --no-deps some-package==1.2",
        "ATTN_DISPATCH_CUDA=1 pip install '.[cuda13]'",
        "`attn-dispatch build-aiter --arch gfx942`",
    ],
)
@pytest.mark.parametrize("columns", [20, 40, 60])
def test_a_command_to_copy_stays_on_one_line(command: str, columns: int):
    lines = wrapped("  - ", f"not built here: {command}, which takes some minutes", columns)
    assert sum(command in line for line in lines) == 1, lines
    assert all(len(line) <= columns or command in line for line in lines)


def test_help_fills_paragraphs_but_not_examples(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    commands = argparse.ArgumentParser(prog="x").add_subparsers()
    parser = add_command(
        commands, "y", print, help="z", description="a\nb\n\n  as it\n  is\n\n" + "word " * 30,
        examples=("x y 1",), notes="More.\n",
    )  # fmt: skip
    text = parser.format_help()
    assert "\na b\n\n  as it\n  is\n\nword word" in text
    assert text.endswith("More.\n\nexamples:\n  x y 1\n")
    assert max(map(len, text.splitlines())) <= 60
    assert parser.parse_args([]).run is print
