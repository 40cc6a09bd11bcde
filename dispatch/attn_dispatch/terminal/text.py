"""Lines that fit the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap

_NARROWEST, _WIDEST = 40, 100
_COMMAND = re.compile(r"`[^`]+`|(?:\w+=\S+ )?pip install(?: -\S+)* [^\s,]+")
_UNBROKEN = "\xa0"
"""A space to the eye, and none to textwrap."""


def width() -> int:
    """Of the terminal, in columns, within reason; 80 where there is none."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))


def counted(number: int, what: str) -> str:
    """ "1 case", "2 cases"."""
    return f"{number} {what}{'s' * (number != 1)}"


def in_units(size: int) -> str:
    """A number of bytes: "256 bytes", "17.2 GB"."""
    if size < 1000:
        return counted(size, "byte")
    value, units = size / 1000, ["kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def filled(text: str) -> str:
    """The text, each of its lines filled to the width of the terminal."""
    return "\n".join("\n".join(wrapped("", x)) for x in text.split("\n"))


def wrapped(label: str, text: str, columns: int | None = None) -> list[str]:
    """The text behind its label, further lines indented as far; a long word, a path or a command
    stays whole: who copies it must not get half of it."""
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)
    lines = textwrap.wrap(
        whole,
        columns or width(),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_UNBROKEN, " ") for line in lines]
