"""Names that a pattern of a command line fits."""

from __future__ import annotations

from fnmatch import fnmatchcase

LONGEST = 1000
"""Characters of a pattern. `fnmatch` takes minutes to read 100,000 opening brackets."""


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern like "ours*" fits a name. A pattern beyond LONGEST fits none."""
    return len(pattern) <= LONGEST and fnmatchcase(name, pattern)
