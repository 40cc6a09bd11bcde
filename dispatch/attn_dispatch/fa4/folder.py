"""The file in which `attn-dispatch build-fa4` puts the compiled kernels, and its cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import platformdirs

LIBRARY = "libattn_dispatch_fa4.so"
VARIABLE = "ATTN_DISPATCH_FA4_LIBRARY"


def library() -> Path:
    """$ATTN_DISPATCH_FA4_LIBRARY, or else a file in a folder of the user."""
    if chosen := os.environ.get(VARIABLE):
        # Path.expanduser raises where there is no such user.
        return Path(os.path.expanduser(chosen))
    try:
        data = platformdirs.user_data_path("attn-dispatch")
    except RuntimeError:  # the user has no home folder: use that of Python's environment
        data = Path(sys.prefix, "share", "attn-dispatch")
    return data / "fa4" / LIBRARY


def cache() -> Path:
    """The folder for what a build keeps: the compiler's environment, and compiled kernels."""
    try:
        return platformdirs.user_cache_path("attn-dispatch") / "fa4"
    except RuntimeError:
        return Path(sys.prefix, "share", "attn-dispatch", "cache", "fa4")
