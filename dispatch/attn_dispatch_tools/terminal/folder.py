"""The folder that a command writes to."""

from __future__ import annotations

import tempfile
from pathlib import Path


def made_folder(folder: Path) -> Path:
    """The folder of --out, created if it is missing.

    Raises:
      ValueError: the folder cannot be created, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Only writing a file shows whether that works, for example on a read-only file system.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"--out: expected a folder, got {folder} ({reason})") from None
    return folder
