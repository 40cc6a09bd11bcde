"""How far something is: a bar on a terminal where rich is installed, lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Something with steps, on its way; without a bar what is said stays a line, and notes of every
    so many steps are lines too."""

    def __init__(self, total: int | None, every: int, is_stderr: bool, bar: Any = None) -> None:
        self._done, self._total, self._every, self._is_stderr = 0, total, every, is_stderr
        self._bar = bar
        self._task = None if bar is None else bar.tasks[0].id

    def step(self, note: str = "") -> None:
        """One more is done."""
        self.at(self._done + 1, self._total, note)

    def at(self, done: int, total: int | None, note: str = "") -> None:
        """So many of so many are done."""
        self._done, self._total = done, total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif note and (done == total or done % self._every == 0):
            self._print(f"{done} of {total}: {note}")

    def say(self, text: str, *, is_bad: bool = False) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            style = "red" if is_bad else None
            self._bar.console.print(text, style=style, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr if self._is_stderr else sys.stdout, flush=True)


@contextmanager
def progress(
    what: str, total: int | None = None, *, every: int = 1, is_stderr: bool = False
) -> Iterator[Progress]:
    """The progress of something that has `total` steps, if that is known.

    Args:
      every: without a bar, how many steps make a line.
      is_stderr: where it is shown, stdout if not.
    """
    console = _console(is_stderr)
    if console is None:
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

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    with Bar(*columns, console=console) as bar:
        bar.add_task(what, total=total, note="")
        yield Progress(total, every, is_stderr, bar)


@contextmanager
def waiting(what: str, *, is_stderr: bool = True) -> Iterator[Any]:
    """Something of unknown length; what this yields takes a text that tells how far it is."""
    console = _console(is_stderr)
    if console is None:
        yield lambda text: None
        return
    with console.status(what, spinner="dots") as status:
        yield lambda text: status.update(f"{what}: {text}")


def _console(is_stderr: bool) -> Any:
    """That of rich, if it is installed and someone looks."""
    stream = sys.stderr if is_stderr else sys.stdout
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=is_stderr, highlight=False)
    return console if console.is_terminal else None
