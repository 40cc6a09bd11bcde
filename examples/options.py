"""Types of command line options, which refuse values that make no sense."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_dispatch.text import error_text


def of(kind: Any, expected: str, is_right: Callable[[Any], bool]) -> Callable[[str], Any]:
    """An argparse type: a valid `kind`, or an error with what was expected."""

    def parsed(text: str) -> Any:
        try:
            if is_right(x := kind(text)):
                return x
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")

    return parsed


NUMBER = of(int, "an int of 0 or more", lambda x: x >= 0)
POSITIVE = of(int, "an int above 0", lambda x: x > 0)
SEED = of(int, "an int from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)
FINITE = of(float, "0 or more", lambda x: 0 <= x < math.inf)
SHARE = of(float, "a number above 0, up to 1", lambda x: 0 < x <= 1)


def make_folder(option: str, folder: Path | None) -> None:
    """Make the folder before the work, or end the process if that fails."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: {option}: {error_text(error)}")


def check_file(option: str, file: Path | None) -> None:
    """Check before the work that the file can be written, or end the process."""
    try:
        if file is not None:
            file.open("a").close()
    except OSError as error:
        sys.exit(f"error: {option}: {error_text(error)}")
