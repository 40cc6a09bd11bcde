"""Drafts by looking them up: what followed the last tokens where they stood before."""

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2
"""How many of the last tokens are looked for, the longest first."""


def lookup(tokens: Sequence[int], most: int) -> list[int]:
    """Up to `most` tokens that may follow: those that did at the latest place like this one."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == last:
                return list(tokens[start + size : start + size + most])
    return []
