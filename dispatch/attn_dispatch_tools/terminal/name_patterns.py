"""Matching names with the patterns of a command line."""

from __future__ import annotations

from fnmatch import fnmatchcase

MAX_LENGTH = 1000
"""The largest number of characters in a pattern: `fnmatch` takes minutes for 100,000 brackets."""


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern like "ours*". A pattern over MAX_LENGTH matches no name."""
    return len(pattern) <= MAX_LENGTH and fnmatchcase(name, pattern)
