"""The folder that a command writes to."""

from __future__ import annotations

import tempfile
from pathlib import Path


def made_folder(folder: Path) -> Path:
    """The folder of --out, which exists then and can be written to.

    Raises:
      ValueError: it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Only a file that is made shows it: a folder may be removed, or its file system read-only.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"--out: expected a folder, got {folder} ({reason})") from None
    return folder
