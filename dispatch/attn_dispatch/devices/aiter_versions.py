"""The versions of AITER that calls can be planned for, as in the target "mi300x:aiter0.1.20"."""

from __future__ import annotations

import re

Version = tuple[int, int, int]

DEV18: Version = (0, 1, 7)
"""amd-aiter 0.1.7.post2.dev18, the release on PyPI."""
_NAMES_OF_DEV18 = ("0.1.7", "0.1.7.post2.dev18")
OLDEST: Version = (0, 1, 15)
"""The first of the later versions whose C++ interface is known."""
NEWEST: Version = (0, 1, 20)
"""The last version that was tried (docs/proof.md)."""

_OF_TARGET = re.compile(r"\s*:\s*aiter[\s-]*v?", re.IGNORECASE)
_VERSION = re.compile(
    r"v?(0|[1-9]\d{,4})\.(0|[1-9]\d{,4})\.(0|[1-9]\d{,4})((?:[.-]?(?:post|dev|rc)\d+)*)"
    r"(?:\+[\w.]+|-\d+-g[0-9a-f]+)?\s*",
    re.ASCII,
)
"""A tag or a wheel's version. To a tag, `git describe` adds the number of commits since and the
last one."""


def version_of(text: str) -> Version | None:
    """The version in texts such as "v0.1.19", "0.1.20.post1" or "0.1.20.dev3+g1234"; None if there
    is none. A development version comes before the release whose number it has."""
    found = _VERSION.fullmatch(text)
    if found is None:
        return None
    major, minor, patch = map(int, found.groups()[:3])
    is_before = re.search(r"dev|rc", found[4]) is not None and "post" not in found[4]
    return major, minor, max(patch - is_before, 0)


def named(target: str) -> tuple[str, str]:
    """The device of a target and the version of AITER that it names, "" without one.

    Raises:
      ValueError: calls cannot be planned for that version.
    """
    device, *rest = _OF_TARGET.split(target, maxsplit=1)
    if not rest:
        return target, ""
    text = rest[0].strip()
    version = version_of(text)
    is_known = version is not None and (text in _NAMES_OF_DEV18 or version >= OLDEST)
    if not is_known:
        raise ValueError(
            "target: expected AITER's version in three numbers, 0.1.7 or from 0.1.15 on, as in "
            f"'mi300x:aiter0.1.20', got {target[:200]!r}"
        )
    return device, text
