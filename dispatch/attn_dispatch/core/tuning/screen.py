"""What tuning says while it runs: to stderr, on a terminal with something that turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from attn_dispatch.console import waiting

Say = Callable[[str], None]


@contextmanager
def tuned(what: str) -> Generator[Say]:
    """Announces what is tuned; what this yields tells how far that is."""
    with waiting(f"tuning {what}") as say:
        yield say


def said(text: str) -> None:
    """A line that stays."""
    print(f"attn_dispatch: {text}", file=sys.stderr, flush=True)
