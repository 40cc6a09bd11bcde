"""Types of command line options that refuse invalid values."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_dispatch.text import error_text


def option_type(kind: Any, expected: str, is_valid: Callable[[Any], bool]) -> Callable[[str], Any]:
    """An argparse type for valid values of `kind`. `expected` describes them in the error."""

    def parsed(text: str) -> Any:
        try:
            if is_valid(x := kind(text)):
                return x
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")

    return parsed


NUMBER = option_type(int, "an int of 0 or more", lambda x: x >= 0)
POSITIVE = option_type(int, "an int above 0", lambda x: x > 0)
SEED = option_type(int, "an int from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)
FINITE = option_type(float, "0 or more", lambda x: 0 <= x < math.inf)
SHARE = option_type(float, "a number above 0, up to 1", lambda x: 0 < x <= 1)


def make_folder(option: str, folder: Path | None) -> None:
    """Make the folder of an option, if one is given; end the process if that fails."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: {option}: {error_text(error)}")


def check_file(option: str, file: Path | None) -> None:
    """Check that the file of an option, if one is given, can be written; else end the process."""
    try:
        if file is not None:
            file.open("a").close()
    except OSError as error:
        sys.exit(f"error: {option}: {error_text(error)}")
