"""Reading an untrusted file in bounded time and memory."""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias, cast  # noqa: TID251  # a JSON value

JsonValue: TypeAlias = Any
"""What `json` reads. Who reads a file catches the errors of a value of another type."""

JsonObject = dict[str, JsonValue]

MAX_BYTES = 2**24
"""The largest file of calls, device properties or a report that is read."""

SECONDS = 60.0
"""The longest time for the other end of a pipe to write everything."""

_MAX_LEVELS = 100
_PART = 2**20


def contents(path: Path, most: int = MAX_BYTES, *, is_kept: bool = False) -> bytes:
    """The bytes of a file, or of a pipe or device (/dev/stdin) until its end.

    A named pipe that no process has opened for writing is at its end.

    Args:
      path: the file. Links are followed.
      most: the largest size in bytes.
      is_kept: whether the library wrote this file itself; then it must be a regular one.

    Raises:
      OSError: the file cannot be read, is larger than `most`, or does not end within SECONDS. The
        error has the file's name.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        facts = os.fstat(handle)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, "expected a file, got a folder", str(path))
        if is_kept and not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "expected a file, got a pipe or a device", str(path))
        parts: list[bytes] = []
        left = most + 1 if facts.st_size <= most else 0
        deadline = time.monotonic() + SECONDS
        while left and (part := _next(handle, min(left, _PART), deadline, path)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(handle)
    if not left:
        size = f"{most / 2**20:g} MiB" if most >= 2**20 else f"{most} bytes"
        raise OSError(errno.EFBIG, f"expected at most {size}, got more", str(path))
    return b"".join(parts)


def _next(handle: int, most: int, deadline: float, path: Path) -> bytes:
    """The next bytes, as soon as there are any; b"" at the end."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    while True:
        try:
            return os.read(handle, most)
        except BlockingIOError:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
                reason = f"expected its end within {SECONDS:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(path)) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def text(path: Path, most: int = MAX_BYTES, *, is_kept: bool = False) -> str:
    """`contents` as text.

    Raises:
      OSError: as `contents`.
      ValueError: the file is not UTF-8. The message has the file's name.
    """
    try:
        return contents(path, most, is_kept=is_kept).decode()
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise ValueError(f"{path}: expected UTF-8, got {found}") from None


def json_file(path: Path, most: int = MAX_BYTES, *, is_kept: bool = False) -> JsonValue:
    """The value of a JSON file.

    Raises:
      OSError: as `contents`.
      ValueError: the file is not UTF-8 or not JSON. The message has the file's name.
    """
    content = text(path, most, is_kept=is_kept)
    try:
        return json_value(content)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None


def json_value(content: str) -> JsonValue:
    """The value of a JSON text.

    Raises:
      ValueError: it is not JSON, is nested too deeply for Python's recursion, or has a name twice
        in one object, where Python would silently take the last.
    """
    if not content.strip():
        raise ValueError("nothing")
    too_deep = f"more than {_MAX_LEVELS} levels of brackets"
    try:
        value = json.loads(content, object_pairs_hook=_unique_names)
    except RecursionError:
        raise ValueError(too_deep) from None
    level: list[JsonValue] = [value]
    for _ in range(_MAX_LEVELS):
        level = [y for x in level for y in _items(x)]
        if not level:
            return value
    raise ValueError(too_deep)


def as_object(value: object) -> JsonObject | None:
    """A JSON value that is an object, by names; None if it is something else."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def _unique_names(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    found: JsonObject = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} twice in one object")
        found[name] = value
    return found


def _items(x: object) -> Iterable[JsonValue]:
    """The values inside a JSON value."""
    if (found := as_object(x)) is not None:
        return found.values()
    return cast("list[JsonValue]", x) if isinstance(x, list) else ()
