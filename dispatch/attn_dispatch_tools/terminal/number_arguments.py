"""Types for numbers on a command line, so that all commands reject wrong ones in the same words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: whole numbers that are at least `least`."""

    def number(text: str) -> int:
        value = _read(int, text, "a whole number")
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return number


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """An argparse type: numbers above 0."""

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
