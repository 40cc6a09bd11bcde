"""Versions of the packages that implementations need, found without importing them."""

from __future__ import annotations

import importlib.metadata
import re


def version_of(*names: str) -> str | None:
    """The version of the first of these packages that is installed; None if none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unknown_version(name: str, found: str, oldest: str, first_unknown: str) -> str:
    """Why this version cannot be used; empty if oldest <= found < first_unknown."""
    if _numbers(oldest) <= _numbers(found) < _numbers(first_unknown):
        return ""
    return f"{name} from {oldest} to below {first_unknown} is needed, and {found} is installed"


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release: (0, 3, 6) for "0.3.6+cu130"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
