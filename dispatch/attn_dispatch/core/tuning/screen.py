"""The messages of tuning on stderr, with a spinner on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from attn_dispatch.console import waiting

Say = Callable[[str], None]


@contextmanager
def progress(what: str) -> Generator[Say]:
    """Show a spinner for the call that is tuned; yields a function that shows the progress."""
    with waiting(f"tuning {what}") as say:
        yield say


def print_line(text: str) -> None:
    """Print a line that remains on the screen."""
    print(f"attn_dispatch: {text}", file=sys.stderr, flush=True)
