"""Wrong and unsupported calls, and the file of what each of them says.

A module of this folder has the rows of one room, one a line, in ROWS: expressions in the module's
own names. A line that starts with # names the rows below it; an indented line continues its row.
A row raises, or returns the text of a refusal.
"""

from __future__ import annotations

import importlib
import textwrap
import warnings
from pathlib import Path
from types import ModuleType

DOCUMENT = Path("tests/results/sentences.md")
ROOMS = ("call", "packed")

_HEAD = """\
# Every sentence that answers a wrong or unsupported call

`make sentences` writes this file from the rows in tests/sentences, which also says what the short
names in them are. Read it as a whole: each sentence says what was expected, what was given, and
where it can, what to do.
"""


def rows_of(room: ModuleType) -> list[str]:
    """The lines of a room's table, with continued rows joined."""
    return room.ROWS.strip().replace("\n    ", " ").splitlines()


def answer(row: str, room: ModuleType) -> str:
    """What a row says: its exception, or the text that it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = eval(row, vars(room))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    assert isinstance(found, str), f"{row}: expected an exception or a text, got {found}"
    return found


def section(name: str) -> str:
    """The part of the document that is about one room."""
    room = importlib.import_module(f"tests.sentences.{name}")
    text = f"## {room.__doc__.removesuffix('.')}\n"
    for row in rows_of(room):
        if row.startswith("# "):
            text += f"\n### {row[2:]}\n"
        elif row:
            text += "\n" + textwrap.indent(f">>> {row}\n{answer(row, room)}\n", "    ")
    return text


def document() -> str:
    """The whole file."""
    return "\n".join([_HEAD, *map(section, ROOMS)])
