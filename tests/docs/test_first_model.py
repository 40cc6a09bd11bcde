"""The model of docs/getting_started.md: the command prints what the page shows."""

from __future__ import annotations

import re
import shlex
import sys

from attn_dispatch_tools import cli
from tests.support.backend import needs_cudnn
from tests.support.repository import DOCS

PAGE = (DOCS / "getting_started.md").read_text("utf-8")
_, _, SECTION = PAGE.partition("## A model of your own\n")
SECTION, _, _ = SECTION.partition("\n## ")


def without_numbers_of_cudnn(text: str) -> str:
    return re.sub(r"scratch memory [\d.]+ \w+", "scratch memory", text).strip()


@needs_cudnn
def test_the_command_lists_the_model_as_the_page_shows(tmp_path, monkeypatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (line,) = re.findall(r"^attn-dispatch (explain-program .*)$", SECTION, re.MULTILINE)
    (shown,) = re.findall(r"```text\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "my_model.py").write_text(program, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # removed again, with what the command adds
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(shlex.split(line))
    assert without_numbers_of_cudnn(capsys.readouterr().out) == without_numbers_of_cudnn(shown)
