"""Wrong and unsupported calls, and the file of what each of them says.

A module of this folder has the rows of one room, one a line, in ROWS: expressions in the module's
own names. A line that starts with # names the rows below it; an indented line continues its row.
A row raises, or returns the text of a refusal.
"""

from __future__ import annotations

import importlib
import textwrap
import warnings
from itertools import groupby
from pathlib import Path
from types import ModuleType

DOCUMENT = Path("tests/results/sentences.md")
ROOMS = ("call", "packed", "serving", "sequence", "mods", "settings", "commands", "rules")

_HEAD = """\
# Every sentence that answers a wrong or unsupported call

`make sentences` writes this file from the rows in tests/sentences, which also says what the short
names in them are. Read it as a whole: each sentence says what was expected, what was given, and
where it can, what to do.
"""


def answer(row: str, room: ModuleType) -> str:
    """What a row says: its exception, or the text that it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = eval(compile(row, str(room.__file__), "eval"), vars(room))
        except (NameError, SyntaxError):  # the row itself is wrong
            raise
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    assert isinstance(found, str), f"{row}: expected an exception or a text, got {found}"
    return found


def section(name: str) -> str:
    """The part of the document that is about one room. Neighbours that say the same are one."""
    room = importlib.import_module(f"tests.sentences.{name}")
    text = f"## {(room.__doc__ or name).removesuffix('.')}\n"
    for group in room.ROWS.strip().removeprefix("# ").replace("\n    ", " ").split("\n# "):
        title, *rows = filter(None, group.split("\n"))
        text += f"\n### {title}\n"
        for said, same in groupby(rows, lambda row: answer(row, room)):
            calls = "".join(f">>> {row}\n" for row in same)
            text += "\n" + textwrap.indent(f"{calls}{said}\n", "    ")
    return text


def document() -> str:
    """The whole file."""
    return "\n".join([_HEAD, *map(section, ROOMS)])
