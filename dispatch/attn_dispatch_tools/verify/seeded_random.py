"""Random choices that are the same in every process and with every version of Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class SeededRandom:
    """Random choices that depend only on a seed.

    It uses only `random()` of Python's generator, the one method that promises the same numbers for
    the same seed in later versions.
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
        """One of the choices, all equally likely."""
        return choices[self.up_to(len(choices) - 1)]

    def is_one_in(self, times: int) -> bool:
        """True with probability 1 / times."""
        return self.up_to(times - 1) == 0

    def some_of(self, choices: Sequence[T]) -> tuple[T, ...]:
        """A subset that is not empty, in the order of the choices."""
        chosen = self.between(1, 2 ** len(choices) - 1)
        return tuple(x for i, x in enumerate(choices) if chosen >> i & 1)
