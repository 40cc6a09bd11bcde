"""What commands print, as docs/cli.md shows it: each block begins with a command line behind a $.

usage: JAX_PLATFORMS=cpu python -m tests.scripts.command_outputs

That writes what they print here; test_command_outputs.py compares.
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
    """(command line, what it prints) of each."""
    return [(x["line"], x["shown"]) for x in _BLOCK.finditer(PAGE.read_text("utf-8"))]


def printed(line: str) -> str:
    """What the command prints, in a pipe, in a folder with the page's calls.json alone."""
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
    def anew(block: re.Match[str]) -> str:
        shown = printed(block["line"])
        for here, anywhere in ((sys.prefix, ".venv"), (str(Path.home()), "~")):
            shown = shown.replace(here, anywhere)
        return f"```console\n$ {block['line']}\n{shown}```"

    PAGE.write_text(_BLOCK.sub(anew, PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
