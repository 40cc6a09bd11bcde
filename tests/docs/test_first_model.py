"""The model of docs/getting_started.md: the command prints what the page shows."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from attn_dispatch_tools import cli
from tests.support.backend import needs_cudnn
from tests.support.repository import DOCS
from tests.support.shown_times import without_predicted_times

PAGE = (DOCS / "getting_started.md").read_text("utf-8")
_, _, SECTION = PAGE.partition("## A model of your own\n")
SECTION, _, _ = SECTION.partition("\n## ")
PROGRAM = "\n\n".join(re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL))
COMMANDS = re.findall(r"^attn-dispatch (explain-program .*)$", SECTION, re.MULTILINE)


def comparable(text: str) -> str:
    """A list without the function's name, numbers of cuDNN's and predicted times."""
    text = re.sub(r"scratch memory [\d.]+ \w+", "scratch memory", text)
    text = re.sub(r"(?m)^(program +)\w+", r"\1", text)
    return without_predicted_times(text).strip()


@needs_cudnn
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_lists_the_model_as_the_page_shows(tmp_path, monkeypatch, capsys, command):
    (shown,) = re.findall(r"```text\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "my_model.py").write_text(PROGRAM, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # removed again, with what the command adds
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(shlex.split(command))
    assert comparable(capsys.readouterr().out) == comparable(shown)


def test_the_page_has_both_commands():
    assert [x.split()[1] for x in COMMANDS] == ["my_model:step", "my_model:step_to_check"]
