"""Progress on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from attn_dispatch.aiter.build.ninja import Report

_console = Console(stderr=True)


def waiting(text: str) -> AbstractContextManager[object]:
    """Something that turns while work of unknown length is done."""
    return _console.status(text)


@contextmanager
def steps(text: str) -> Iterator[Report]:
    """A bar, moved by calling what this yields; only what is still to be built counts."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[step]}"),
        console=_console,
    ) as progress:
        task = progress.add_task(text, total=None, step="")

        def report(done: int, total: int, step: str) -> None:
            progress.update(task, completed=done, total=total, step=step[:60])

        yield report
