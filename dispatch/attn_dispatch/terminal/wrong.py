"""What is wrong with a command line, said in one way by all commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

_SHOWN = 2000
"""Characters of an error."""


def said(error: Exception) -> str:
    """An error as a sentence; of a file its name, and why not, without Python's numbers. What was
    given is shown in part if it is long."""
    text = _said(error)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror[0].lower() + error.strerror[1:]
        return f"{error.filename}: {reason}" if error.filename else reason
    return str(error)


def at_least(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from this one on."""

    def number(text: str) -> int:
        value = _read(int, text, "a whole number")
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return number


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """A type of argparse: numbers above 0."""

    def number(text: str) -> Number:
        value = _read(kind, text, "a whole number" if kind is int else "a number")
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
        return value

    return number


def _read(kind: type[Number], text: str, expected: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
