"""The folders of the user in which libraries, and what can be made again, are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import platformdirs

from attn_dispatch.environment import OFF

_NAME = "attn-dispatch"


def data() -> Path:
    """The folder for libraries that the user built; Python's environment has it if the user has no
    home folder."""
    try:
        return platformdirs.user_data_path(_NAME)
    except RuntimeError:
        return Path(sys.prefix, "share", _NAME)


def cache() -> Path:
    """The folder for what can be made again, likewise."""
    try:
        return platformdirs.user_cache_path(_NAME)
    except RuntimeError:
        return Path(sys.prefix, "share", _NAME, "cache")


def cache_path(variable: str, name: str) -> Path | None:
    """The path of a file or folder saved for other processes; it need not exist.

    The environment variable names it; by default it is `name` in the user's cache folder. None if
    the variable is "off", or if the user has no home folder, as in some containers.
    """
    named = os.environ.get(variable)
    if named:
        return None if named.lower() == OFF else Path(os.path.expanduser(named))
    try:
        return platformdirs.user_cache_path(_NAME) / name
    except RuntimeError:
        return None


def why_no_cache_path(variable: str) -> str:
    """Why `cache_path` returns None for this variable."""
    named = os.environ.get(variable)
    return f"{variable}={named}" if named else f"you have no home folder, and no {variable}"
