"""Text for people: numbers with their units, lines of a given width, an error as a sentence."""

from __future__ import annotations

import re
import textwrap

_COMMAND = re.compile(r"`[^`]+`|(?:\w+=\S+ )?pip install(?: -\S+)* [^\s,]+")
_UNBROKEN = "\xa0"
"""A space to the eye, and none to textwrap."""

_LONGEST_ERROR = 2000
"""Characters of an error that are shown."""


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


def duration(microseconds: float) -> str:
    """ "26.9 us", "1.07 ms"."""
    if microseconds < 999.5:
        return f"{microseconds:.3g} us"
    return f"{microseconds / 1000:.3g} ms"


def wrapped(label: str, text: str, columns: int) -> list[str]:
    """The text behind its label, in lines of at most `columns`; further lines are indented as far.

    A long word, a path or a command stays whole: who copies it must not get half of it.
    """
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)
    lines = textwrap.wrap(
        whole,
        columns,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_UNBROKEN, " ") for line in lines]


def error_text(error: Exception) -> str:
    """The error in words, cut off if it is long.

    An OSError is the file's name and the reason, without Python's numbers.
    """
    text = _whole_error_text(error)
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"


def _whole_error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror[0].lower() + error.strerror[1:]
        return f"{error.filename}: {reason}" if error.filename else reason
    return str(error)
