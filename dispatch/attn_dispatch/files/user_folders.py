"""The folders of the user in which libraries and their parts are kept."""

from __future__ import annotations

import sys
from pathlib import Path

import platformdirs

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
