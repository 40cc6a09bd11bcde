"""A value that a test knows to be there."""

from __future__ import annotations

from typing import TypeVar

X = TypeVar("X")


def present(value: X | None) -> X:
    """The value, which is not None."""
    assert value is not None
    return value
