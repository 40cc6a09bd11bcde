"""Warning categories, and issuing each warning once, at the program's line that made the call."""

from __future__ import annotations

import inspect
import os
import warnings
from threading import Lock

import jax
import jaxlib

Line = tuple[str, int]
"""File name and line number."""


class AttentionFallbackWarning(UserWarning):
    """XLA runs a call on a GPU because no GPU kernel can; the message gives every reason."""


class AttentionConventionWarning(UserWarning):
    """A valid call probably means something else, or a patch has no effect; the message says how to
    express what is meant."""


class AttentionKernelWarning(UserWarning):
    """A kernel with a known defect runs a call; the message says how to run it otherwise."""


class AttentionShardingWarning(UserWarning):
    """A call's arrays are sharded such that devices compute more than their share of the call, or
    gather arrays for it."""


def _folder(file: str) -> str:
    return os.path.dirname(os.path.abspath(file)) + os.sep


_inside = [_folder(file) for file in (__file__, jax.__file__, jaxlib.__file__) if file]
_PYTHON_WRAPPERS = tuple(os.sep + name for name in ("contextlib.py", "functools.py"))
"""Files of Python's standard library that frames inside JAX go through."""

_MAX_REMEMBERED = 4096

_issued: set[tuple[str, type[Warning], Line]] = set()
_lock = Lock()


def warn_once(message: str, category: type[Warning], line: Line | None = None) -> None:
    """Warn at this line, or the caller's: once per line and message, whatever the filters are."""
    line = line or caller() or ("<unknown>", 1)
    if _is_new((message, category, line)):
        warnings.warn_explicit(message, category, *line)


def warn_of_convention(message: str, line: Line | None = None) -> None:
    """Warn once of an argument that means something else, or nothing, where the call comes from."""
    warn_once(message, AttentionConventionWarning, line)


def forget() -> None:
    """Issue every warning again, even those that were issued already."""
    _issued.clear()


def skip_frames_of(file: str | None) -> None:
    """Skip the frames of a package, named by its `__init__` file, when looking for the caller.

    Packages that make calls for their users need it: a warning should name the users' line.
    """
    if file and (folder := _folder(file)) not in _inside:
        _inside.append(folder)


def caller() -> Line | None:
    """The innermost line outside this package, JAX and the skipped packages."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_outside(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def is_outside(file: str) -> bool:
    """Whether a file is outside this package, JAX and the skipped packages."""
    return not file.startswith((*_inside, "<")) and not file.endswith(_PYTHON_WRAPPERS)


def _is_new(warned: tuple[str, type[Warning], Line]) -> bool:
    with _lock:
        if warned in _issued:
            return False
        if len(_issued) >= _MAX_REMEMBERED:
            _issued.clear()
        _issued.add(warned)
        return True
