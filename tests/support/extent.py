"""How much the tests try: a sample in `make test`, everything in `make soak`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

EVERY_PLAN = bool(os.environ.get("ATTN_DISPATCH_TEST_EVERY_PLAN"))
"""Whether cuDNN plans every call."""
EVERY_SIZE = bool(os.environ.get("ATTN_DISPATCH_TEST_EVERY_SIZE"))
"""Whether every case runs, at every size."""
in_soak = pytest.mark.skipif(not EVERY_SIZE, reason="runs in `make soak`")
"""The mark of tests that take minutes, and look at what a change seldom touches."""


def sample(cases: Sequence[Case], one_in: int) -> Sequence[Case]:
    """One in so many of the cases, from the first on; in `make soak` all of them."""
    return cases[:: 1 if EVERY_SIZE else one_in]


def number_of_draws(usual: int, most: int | None = None) -> int:
    """The number of calls to draw: `usual`, unless the environment asks for another.

    Args:
      usual: the number in `make test`.
      most: the largest number that takes no more than minutes; None if any does.
    """
    asked = int(os.environ.get("ATTN_DISPATCH_TEST_DRAWS", "0")) or usual
    return asked if most is None else min(asked, most)
