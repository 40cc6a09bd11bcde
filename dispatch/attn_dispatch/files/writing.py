"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

_BEGUN = re.compile(r"begun-[0-9a-f]{16}")
_STALE = 3600.0
"""The seconds after which an unfinished file counts as abandoned."""


def replace(file: Path, content: bytes, mode: int | None = None) -> None:
    """Replace `file` with a new file. Readers see the old or the new one, even if this process is
    killed meanwhile.

    Args:
      file: the file to replace; a link is replaced itself, not followed.
      content: all of the new file.
      mode: its permissions; None means the process's default for new files.

    Raises:
      OSError: it cannot be written, and `file` is unchanged. The error has the file's name.
    """
    begun = file.with_name(f"begun-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        # The system applies the umask here: a process can only read it by changing it for a moment.
        handle = os.open(begun, flags, 0o666 if mode is None else 0o600)
        try:
            with open(handle, "wb") as opened:
                opened.write(content)
                if mode is not None:
                    os.fchmod(handle, mode)
            os.replace(begun, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(begun)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def remove_stale(folder: Path) -> list[str]:
    """Remove files of this folder that `replace` began and never finished; returns all its names.

    A folder that cannot be read has none.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for name in filter(_BEGUN.fullmatch, names):
        with contextlib.suppress(OSError):
            if os.lstat(folder / name).st_mtime < time.time() - _STALE:
                os.unlink(folder / name)
    return names
