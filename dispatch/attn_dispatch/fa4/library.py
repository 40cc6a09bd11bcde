"""Finds the package fa4-jax without importing it, which would take a second."""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache

from attn_dispatch.devices.packages import unknown_version, version_of

NAME = "fa4-jax"
OLDEST, FIRST_UNKNOWN = "0.1.0", "0.2"
"""The range of versions with known backends. `fa4_jax.attention`, which defines their arguments, is
not exported by the package; it was read in the oldest version."""


@lru_cache(maxsize=1)
def version() -> str | None:
    """The package's version; None where it is not installed."""
    return version_of(NAME)


def unusable_reason() -> str:
    """Why its kernels cannot be used here; empty if they can."""
    found = version()
    if found is None:
        needs = ", which needs Python 3.12" if sys.version_info < (3, 12) else ""
        return f"not installed: pip install {NAME}{needs}"
    return unknown_version(NAME, found, OLDEST, FIRST_UNKNOWN)


def loading_failure() -> str:
    """Why its compiler cannot be loaded on this machine, which has such a GPU; empty if it can."""
    try:
        importlib.import_module("fa4_jax.kernels")
    except Exception as error:  # it imports a chain of packages, which raise errors of many types
        return f"{NAME}'s kernels cannot be imported: {type(error).__name__}: {error}"
    return ""
