"""What is trained on: the functions and classes of Python's own standard library, byte by byte.

They come with every Python, and their lengths have a long tail: half of them are shorter than 500
bytes, one in twenty is longer than 7,000.
"""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 256
BEGIN = 0
"""Begins each document; a NUL byte, which no source has."""

_TOP_LEVEL = re.compile(rb"\n(?=@|def |class |async def )")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SHORTEST = 16


def standard_library(longest: int, files: int | None = None) -> list[np.ndarray]:
    """Documents of at most `longest` tokens, uint8; longer ones are cut into several.

    `files` is how many source files are read: all of them without it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(x for x in root.rglob("*.py") if not _LEFT_OUT & {*x.parts})[:files]
    return [piece for path in paths for piece in _pieces(path.read_bytes(), longest)]


def _pieces(source: bytes, longest: int) -> Iterator[np.ndarray]:
    for part in _TOP_LEVEL.split(source):
        for at in range(0, len(part), longest - 1):
            piece = part[at : at + longest - 1]
            if len(piece) >= _SHORTEST:
                yield np.frombuffer(bytes([BEGIN]) + piece, np.uint8)
