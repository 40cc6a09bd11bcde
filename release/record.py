"""The record of a run: outcome, time and size of each step, printed and written as JSON."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environments import Failed
from plugins import REPOSITORY, VERSION

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Outcome:
    """The result of a step that succeeded: a short report."""

    output: str = ""
    size: int | None = None
    """The size of the file or environment that the step made, in bytes."""


@dataclass(frozen=True)
class Row:
    part: str
    """The name of the step."""
    state: str
    """ok, WRONG or left out."""
    seconds: float
    output: str
    size: int | None = None
    cpu_seconds: float | None = None
    python: str = ""
    jax: str = ""

    def __str__(self) -> str:
        where = " ".join(x for x in (self.python and f"CPython {self.python}", self.jax) if x)
        size = "" if self.size is None else f"{self.size / 1e6:.2f} MB"
        facts = "; ".join(x for x in (f"{self.seconds:.0f} s", size, self.output) if x)
        return f"{self.state:<8} {where and f'{where}: '}{self.part}: {facts}"


class Record:
    """The steps so far. Each is printed and written immediately, because a run takes an hour."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._begun = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._commit = commit()

    def add(self, part: str, task: Callable[[], Outcome], python: str = "", jax: str = "") -> bool:
        """Run a step, and return whether it succeeded."""
        start, used = time.monotonic(), cpu_seconds()
        try:
            state, outcome = "ok", task()
        except Failed as failure:
            state, outcome = "WRONG", Outcome(str(failure))
        seconds = round(time.monotonic() - start, 1)
        used = round(cpu_seconds() - used, 1)
        self._append(Row(part, state, seconds, outcome.output, outcome.size, used, python, jax))
        return state == "ok"

    def leave_out(self, part: str, why: str) -> None:
        self._append(Row(part, "left out", 0, why))

    def _append(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)
        self._write()

    @property
    def is_wrong(self) -> bool:
        return any(x.state == "WRONG" for x in self.rows)

    def _write(self) -> None:
        facts = {
            "begun": self._begun,
            "commit": self._commit,
            "version": VERSION,
            "cores": os.cpu_count(),
            "libc": " ".join(platform.libc_ver()),
            "rows": [asdict(x) for x in self.rows],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(facts, indent=1) + "\n")


def commit() -> str:
    """The commit of the checkout, marked if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def cpu_seconds() -> float:
    """The CPU time of all commands that have ended. It depends little on the machine's load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder, without links."""
    return sum(x.lstat().st_size for x in folder.rglob("*") if x.is_file() and not x.is_symlink())


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
