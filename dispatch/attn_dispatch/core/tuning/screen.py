"""What tuning says while it runs: to stderr, on a terminal with something that turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]


@contextmanager
def tuned(what: str) -> Iterator[Say]:
    """Announces what is tuned; what this yields tells how far that is."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        from rich.console import Console
    except ImportError:  # the one thing that rich is needed for
        yield lambda text: None
        return
    console = Console(stderr=True, highlight=False)
    with console.status(f"tuning {what}", spinner="dots") as status:
        yield lambda text: status.update(f"tuning {what}: {text}")


def said(text: str) -> None:
    """A line that stays."""
    print(f"attn_dispatch: {text}", file=sys.stderr, flush=True)
