"""Drafts by lookup: the tokens that followed an earlier occurrence of the last tokens."""

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2
"""The most and the fewest last tokens that are looked up; the most are tried first."""


def lookup(tokens: Sequence[int], most: int) -> list[int]:
    """Up to `most` tokens that followed the latest earlier occurrence of the last tokens."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == last:
                return list(tokens[start + size : start + size + most])
    return []
