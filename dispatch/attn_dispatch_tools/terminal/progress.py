"""The progress of a command: a bar on a terminal if rich is installed, otherwise lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attn_dispatch.console import console
from attn_dispatch_tools.terminal.style import BAD
from attn_dispatch_tools.terminal.text import width

_ROOM_FOR_A_BAR = 70
"""The fewest columns for a bar. On fewer, rich would cut the numbers."""


class Progress:
    """The progress of a task in steps, shown by a bar or, without one, by lines.

    Without a bar, the notes of every `every` steps are printed, too.
    """

    def __init__(self, total: int | None, every: int, is_stderr: bool, bar: Any = None) -> None:
        self._done, self._total, self._every, self._is_stderr = 0, total, every, is_stderr
        self._bar = bar
        self._task = None if bar is None else bar.tasks[0].id

    def step(self, note: str = "") -> None:
        """Show that one more step is done."""
        self.at(self._done + 1, self._total, note)

    def at(self, done: int, total: int | None, note: str = "") -> None:
        """Show that `done` of `total` steps are done."""
        self._done, self._total = done, total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif note and (done == total or done % self._every == 0):
            self._print(f"{done} of {total}: {note}")

    def print_line(self, text: str, *, is_bad: bool = False) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._bar is not None:
            style = BAD if is_bad else None
            self._bar.console.print(text, style=style, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr if self._is_stderr else sys.stdout, flush=True)


@contextmanager
def progress(
    what: str, total: int | None = None, *, every: int = 1, is_stderr: bool = False
) -> Iterator[Progress]:
    """Show the progress of a task within this context.

    Args:
      what: the label of the bar.
      total: the number of steps, if it is known.
      every: without a bar, the number of steps between lines.
      is_stderr: whether to write to stderr, not to stdout.
    """
    shown_on = console(is_stderr=is_stderr)
    if shown_on is None:
        yield Progress(total, every, is_stderr)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    note = TextColumn("{task.fields[note]}", markup=False)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), note)
    if width() >= _ROOM_FOR_A_BAR:
        columns = (
            columns[0], BarColumn(), columns[1], TimeElapsedColumn(), TimeRemainingColumn(), note,
        )  # fmt: skip
    with Bar(*columns, console=shown_on) as bar:
        bar.add_task(what, total=total, note="")
        yield Progress(total, every, is_stderr, bar)
