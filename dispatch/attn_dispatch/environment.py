"""The environment variables of files that are loaded or saved, and the reading of variables.

The build of wheels, which has no JAX, judges files, too.
"""

from __future__ import annotations

import os

TRUST_FILES = "ATTN_DISPATCH_TRUST_FILES"
"""The environment variable that allows, with 1, plans and libraries that another user wrote."""

OFF = "off"
"""The value of a variable for a file or folder that turns saving off."""


def variable(name: str, default: str) -> tuple[str, str]:
    """An environment variable's value, `default` if it is empty or not set; and its name."""
    return os.environ.get(name) or default, name


def flag(name: str, default: str = "0") -> bool:
    """Whether an environment variable is 1.

    Raises:
      ValueError: it is neither 0 nor 1.
    """
    value, _ = variable(name, default)
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
