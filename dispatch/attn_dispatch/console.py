"""Lines on stderr, and rich's console and a spinner, if rich is installed, on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any  # noqa: TID251  # rich's console, which need not be installed


def console(*, is_stderr: bool = False) -> Any:
    """rich's console; None without rich, if the output is a file or a pipe, and on a terminal that
    can only print. With NO_COLOR set it prints no colours."""
    stream = sys.stderr if is_stderr else sys.stdout
    if stream is None or not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    found = Console(stderr=is_stderr, highlight=False)
    return found if found.is_terminal else None


@contextmanager
def waiting(what: str, *, is_stderr: bool = True) -> Generator[Callable[[str], None]]:
    """Show a spinner beside `what` while the block runs, if the output is a terminal.

    Yields a function that takes a text about the progress and shows it.
    """
    shown_on = console(is_stderr=is_stderr)
    if shown_on is None:
        yield lambda text: None
        return
    with shown_on.status(what, spinner="dots") as status:
        yield lambda text: status.update(f"{what}: {text}")


def print_line(text: str) -> None:
    """Print a line on stderr that remains there."""
    print(f"attn_dispatch: {text}", file=sys.stderr, flush=True)
