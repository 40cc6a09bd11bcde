"""The file with the kernels that `attn-dispatch build-fa4` compiled, and the cache of builds."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from attn_dispatch.files import user_folders

LIBRARY = "libattn_dispatch_fa4.so"
VARIABLE = "ATTN_DISPATCH_FA4_LIBRARY"


def library() -> Path:
    """The file that this process loads, which may not exist.

    That is $ATTN_DISPATCH_FA4_LIBRARY, else what the user built, else what came in the wheel.
    """
    if chosen := _chosen():
        return chosen
    return next((x for x in (_in_user_folder(), *_in_package()) if os.path.isfile(x)), target())


def target() -> Path:
    """Where build-fa4 puts the file."""
    return _chosen() or _in_user_folder()


def cache() -> Path:
    """The folder for what a build keeps: the compiler's environment, and compiled kernels."""
    return user_folders.cache() / "fa4"


def no_file(path: Path) -> str:
    """What there is instead of a file: "a folder"; "" for a file, and for nothing."""
    if os.path.isfile(path) or not os.path.exists(path):
        return ""
    return "a folder" if os.path.isdir(path) else "a pipe or device"


def is_in_package(path: Path) -> bool:
    """Whether this is the file that came in the wheel."""
    return path in _in_package()


def _chosen() -> Path | None:
    chosen = os.environ.get(VARIABLE)
    # Path.expanduser raises where there is no such user.
    return Path(os.path.expanduser(chosen)) if chosen else None


def _in_user_folder() -> Path:
    return user_folders.data() / "fa4" / LIBRARY


def _in_package() -> tuple[Path, ...]:
    """A place beside `_cuda`, which an editable installation has elsewhere than this file."""
    found = find_spec("attn_dispatch._cuda")
    return () if found is None or found.origin is None else (Path(found.origin).parent / LIBRARY,)
