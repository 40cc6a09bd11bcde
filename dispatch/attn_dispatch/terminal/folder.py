"""The folder that a command writes to."""

from __future__ import annotations

import os
from pathlib import Path


def made_folder(folder: Path) -> Path:
    """The folder of --out, which exists then and can be written to.

    Raises:
      ValueError: it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: expected a folder, got {folder} ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--out: expected a folder, got {folder} (it cannot be written to)")
    return folder
