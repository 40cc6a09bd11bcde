"""SVG files with short numbers and without indentation, to keep pictures in a repository small."""

from __future__ import annotations

import re
from pathlib import Path

_LONG = re.compile(r"\d+\.\d{3,}")
_INDENTED = re.compile(r"\n +<")
_TAG = re.compile(r"<[^>]+>")


def shorten(path: Path) -> None:
    """Round the numbers in an SVG file's tags to a hundredth of a point; remove its indentation."""
    text = _INDENTED.sub("\n<", path.read_text(encoding="utf-8"))
    path.write_text(_TAG.sub(lambda tag: _LONG.sub(_rounded, tag[0]), text), encoding="utf-8")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
