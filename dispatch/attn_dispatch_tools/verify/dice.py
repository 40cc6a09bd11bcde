"""Chance that is the same everywhere: in every process, and with every version of Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Draws from a seed alone.

    Of Python's generator only `random()` is used: for the same seed it promises the same numbers in
    later versions, which its other methods do not.
    """

    def __init__(self, seed: str) -> None:
        self._generator = random.Random(seed)

    def up_to(self, most: int) -> int:
        """A whole number from 0 to `most`, both included."""
        return int(self._generator.random() * (most + 1))

    def between(self, least: int, most: int) -> int:
        """A whole number from `least` to `most`, both included."""
        return least + self.up_to(most - least)

    def one_of(self, choices: Sequence[T]) -> T:
        """One of them, all equally likely."""
        return choices[self.up_to(len(choices) - 1)]

    def in_one_of(self, times: int) -> bool:
        """True in one of so many times."""
        return self.up_to(times - 1) == 0

    def some_of(self, choices: Sequence[T]) -> tuple[T, ...]:
        """Any subset that is not empty, in their order."""
        chosen = self.between(1, 2 ** len(choices) - 1)
        return tuple(x for i, x in enumerate(choices) if chosen >> i & 1)
