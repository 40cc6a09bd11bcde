"""Lines that fit the terminal."""

from __future__ import annotations

import shutil

from attn_dispatch import text as plain_text

_NARROWEST, _WIDEST = 40, 100


def width() -> int:
    """The terminal's width in columns, between 40 and 100; 80 if there is no terminal."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))


def filled(text: str) -> str:
    """The text, with each line wrapped to the width of the terminal."""
    return "\n".join("\n".join(wrapped("", x)) for x in text.split("\n"))


def wrapped(label: str, text: str, columns: int | None = None) -> list[str]:
    """`attn_dispatch.text.wrapped`, to the width of the terminal unless `columns` is given."""
    return plain_text.wrapped(label, text, columns or width())
