"""The outputs of commands in docs/cli.md: each block begins with $ and a command line.

usage: JAX_PLATFORMS=cpu python -m tests.scripts.command_outputs

This runs the commands and writes their outputs into the page. test_command_outputs.py compares.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from attn_dispatch_tools import cli
from tests.support.repository import DOCS

PAGE = DOCS / "cli.md"
_BLOCK = re.compile(r"^```console\n\$ (?P<line>.*)\n(?P<shown>(?s:.*?))^```$", re.M)
_CALLS = re.compile(r"^```json\n(?P<calls>(?s:.*?))^```$", re.M)
COLUMNS = "80"


def blocks() -> list[tuple[str, str]]:
    """The (command line, output) of each block."""
    return [(x["line"], x["shown"]) for x in _BLOCK.finditer(PAGE.read_text("utf-8"))]


def output_of(line: str) -> str:
    """The output of a command, in a pipe and in a folder that holds only the page's calls.json."""
    words = shlex.split(line)
    count = words.index("attn-dispatch")
    environment = dict(x.split("=", 1) for x in words[:count])
    out = io.StringIO()
    with _empty_folder(), mock.patch.dict(os.environ, environment | {"COLUMNS": COLUMNS}):
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main(words[count + 1 :])
    return out.getvalue()


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    (calls,) = _CALLS.findall(PAGE.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("calls.json").write_text(calls, encoding="utf-8")
        yield


def main() -> None:
    def updated(block: re.Match[str]) -> str:
        shown = output_of(block["line"])
        for here, anywhere in ((sys.prefix, ".venv"), (str(Path.home()), "~")):
            shown = shown.replace(here, anywhere)
        return f"```console\n$ {block['line']}\n{shown}```"

    PAGE.write_text(_BLOCK.sub(updated, PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
