"""Lines that fit the terminal."""

from __future__ import annotations

import shutil
import textwrap

_NARROWEST, _WIDEST = 60, 100


def width() -> int:
    """Of the terminal, in columns, within reason; 80 where there is none."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))


def wrapped(label: str, text: str, columns: int | None = None) -> list[str]:
    """The text behind its label, further lines indented as far; a long word or path stays whole."""
    return textwrap.wrap(
        text,
        columns or width(),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
