"""The progress of a build on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attn_dispatch_tools.build_aiter.ninja import Report
from attn_dispatch_tools.terminal.progress import progress


@contextmanager
def steps(text: str) -> Iterator[Report]:
    """Yields a function that reports a step and moves a bar. Files that were built earlier do not
    count as steps."""
    with progress(text, every=_PLAIN_EVERY, is_stderr=True) as shown:
        yield lambda done, total, step: shown.at(done, total, step[:60])


_PLAIN_EVERY = 50
