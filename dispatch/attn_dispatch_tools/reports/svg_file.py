"""SVG files with short numbers, which keep pictures in a repository small."""

from __future__ import annotations

import re
from pathlib import Path

_LONG = re.compile(r"\d+\.\d{3,}")


def shorten_numbers(path: Path) -> None:
    """Round all numbers in an SVG file to a hundredth of a point."""
    text = path.read_text(encoding="utf-8")
    path.write_text(_LONG.sub(_rounded, text), encoding="utf-8")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
