"""Finds the package fa4-jax without importing it, which would take a second."""

from __future__ import annotations

import importlib
from functools import lru_cache

from attn_dispatch.devices.packages import package_reason, version_of
from attn_dispatch.reason import Reason

NAME = "fa4-jax"
VERSIONS = "0.1.0", "0.2"
"""The range of versions with known backends. `fa4_jax.attention`, which defines their arguments, is
not exported by the package; it was read in the oldest version."""


@lru_cache(maxsize=1)
def version() -> str | None:
    """The package's version; None where it is not installed."""
    return version_of(NAME)


def unusable_reason() -> Reason | None:
    """Why the package's kernels cannot be used here; None if they can."""
    return package_reason("fa4/library", NAME, version(), VERSIONS, NAME)


def loading_failure() -> str:
    """Why the package's compiler cannot be loaded here, beside such a GPU; empty if it can."""
    try:
        importlib.import_module("fa4_jax.kernels")
    except Exception as error:  # it imports a chain of packages, which raise errors of many types
        return f"{NAME}'s kernels cannot be imported: {type(error).__name__}: {error}"
    return ""
