"""Divisors of extents, which may be too large to try every smaller number."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np

_TRIED_AT_ONCE = 2**16


@lru_cache(maxsize=256)
def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`, or 1."""
    if number <= most:
        return number
    # One of two divisors whose product is the number is at most its root.
    found, end = 1, min(most, isqrt(number)) + 1
    for start in range(1, end, _TRIED_AT_ONCE):
        tried = np.arange(start, min(start + _TRIED_AT_ONCE, end), dtype=np.int64)
        small = tried[number % tried == 0]
        both = np.concatenate([small, number // small])
        found = max(found, int(both[both <= most].max(initial=1)))
    return found
