"""Packages that an implementation is made of: their versions, without importing them."""

from __future__ import annotations

import importlib.metadata
import re


def version_of(*names: str) -> str | None:
    """That of the first of these that is installed; None where none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unknown_version(name: str, found: str, oldest: str, first_unknown: str) -> str:
    """Why this version will not do; empty if it is from the oldest to below the first unknown."""
    if _numbers(oldest) <= _numbers(found) < _numbers(first_unknown):
        return ""
    return f"{name} from {oldest} to below {first_unknown} is needed, and {found} is installed"


def _numbers(version: str) -> tuple[int, ...]:
    """Of "0.3.6+cu130" 0, 3 and 6."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
