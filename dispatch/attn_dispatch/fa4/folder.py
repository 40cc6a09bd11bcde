"""The file in which `attn-dispatch build-fa4` puts the compiled kernels, and its cache."""

from __future__ import annotations

import os
from pathlib import Path

from attn_dispatch.files import user_folders

LIBRARY = "libattn_dispatch_fa4.so"
VARIABLE = "ATTN_DISPATCH_FA4_LIBRARY"


def library() -> Path:
    """$ATTN_DISPATCH_FA4_LIBRARY, or else a file in a folder of the user."""
    if chosen := os.environ.get(VARIABLE):
        # Path.expanduser raises where there is no such user.
        return Path(os.path.expanduser(chosen))
    return user_folders.data() / "fa4" / LIBRARY


def cache() -> Path:
    """The folder for what a build keeps: the compiler's environment, and compiled kernels."""
    return user_folders.cache() / "fa4"
