"""Plans every call of plan_cases.py with one cuDNN. As a script it prints a JSON line for each.

A process can load one cuDNN, which ATTN_DISPATCH_CUDNN names, so that each version is planned in
another process. If cuDNN ends a process, the next process plans the remaining calls.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from attn_dispatch import cudnn
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices.target import parse
from attn_dispatch.reason import reason_from_sentence
from tests.support.plan_cases import CASES, cells_of
from tests.support.repository import environment

INSTALLED = "installed"
"""Stands for the cuDNN that JAX would use."""

_MAX_CRASHES = 8

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Cell:
    """The plan of one call on one kind of GPU, or the reasons against it."""

    sentences: dict[str, str] = field(default_factory=dict)
    """The reasons why the call is not planned: sentences, by rule."""
    engine: str = ""
    workspace_bytes: int = -1
    crash: str = ""
    """How the planning process ended, if it crashed."""


@dataclass(frozen=True)
class Matrix:
    """The cells of all calls with one cuDNN."""

    version: int
    path: str
    cells: dict[Key, Cell]

    @property
    def version_text(self) -> str:
        """The version without its patch number, which changes no refusal."""
        return f"{self.version // 10000}.{self.version // 100 % 100}"


class Planning:
    """Successive processes that plan with one cuDNN; the constructor starts the first."""

    def __init__(
        self, library: str = INSTALLED, script: Path = Path(__file__), part: int | None = None
    ) -> None:
        self._environment = _environment(library)
        self._script = script
        self._part = "" if part is None else str(part)
        self.keys = cells_of(part)
        self._start()

    def matrix(self) -> Matrix:
        """Wait until everything is planned, and return the cells."""
        cells: list[Cell] = []
        crashes = 0
        while True:
            code, lines, errors = self._finish()
            if not lines:
                raise RuntimeError(f"planning did not begin:\n{errors}")
            version, path = lines[0]
            cells += [Cell(**x) for x in lines[1:]]
            if len(cells) == len(self.keys) and code == 0:
                matrix = Matrix(version, path, dict(zip(self.keys, cells, strict=True)))
                return replace(matrix, cells=_without_patch(matrix))
            crashes += 1
            if crashes > _MAX_CRASHES or len(cells) == len(self.keys):
                raise RuntimeError(
                    f"planning ended {crashes} times, at last with {code}:\n{errors}"
                )
            cells.append(Cell(crash=f"the process ended with {code}: {errors[-1000:]}"))
            self._start(skip=len(cells))

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def _start(self, skip: int = 0) -> None:
        self._out = tempfile.TemporaryFile("w+")  # a pipe would fill before anyone reads it
        self._process = subprocess.Popen(
            [sys.executable, self._script, str(skip), self._part], stdout=self._out,
            stderr=subprocess.PIPE, text=True, env=self._environment,
        )  # fmt: skip

    def _finish(self) -> tuple[int, list[Any], str]:
        """Wait for the process; return its exit code, complete lines and standard error."""
        _, errors = self._process.communicate()
        with self._out as out:
            out.seek(0)
            lines = [json.loads(line) for line in out if line.endswith("\n")]
        return self._process.returncode, lines, errors


def _without_patch(matrix: Matrix) -> dict[Key, Cell]:
    """The cells with reasons that name the version as `version_text` does."""
    names = rf"\b{re.escape(matrix.version_text)}\.\d+|\b{matrix.version}\b"

    def named(cell: Cell) -> Cell:
        sentences: dict[str, str] = {}
        for rule, text in cell.sentences.items():
            # The source line of a mod in a reason is left out as well.
            text = re.sub(r" \(at \S+\)", "", re.sub(names, matrix.version_text, text))
            source, is_sentence, _ = rule.partition(": ")
            sentences[reason_from_sentence(source, text).rule if is_sentence else rule] = text
        return replace(cell, sentences=sentences)

    return {key: named(cell) for key, cell in matrix.cells.items()}


def cell(spec: AttentionSpec, arch: str) -> Cell:
    """The plan, or every reason against one."""
    device = parse(arch)
    if reasons := cudnn.not_supported_reasons(spec, device):
        return Cell({x.rule: x.text for x in reasons})
    plan = cudnn.plan(spec, device)
    return Cell(engine=plan.engine, workspace_bytes=plan.workspace_bytes)


def main() -> None:
    library = cudnn_library.find()
    print(json.dumps([library.version, library.path]), flush=True)
    spec_of = cache(lambda label, direction: CASES[label].spec(direction))
    skip, part = int(sys.argv[1]), sys.argv[2]
    for label, direction, arch in cells_of(int(part) if part else None)[skip:]:
        print(json.dumps(asdict(cell(spec_of(label, direction), arch))), flush=True)


def _environment(library: str) -> dict[str, str]:
    if library == INSTALLED:
        return environment()
    # Older cuDNNs need NVRTC to plan, and look for it beside themselves or where this says.
    nvrtc = [
        str(Path(str(file.locate())).parent)
        for file in importlib.metadata.files("nvidia-cuda-nvrtc") or []
        if file.name.startswith("libnvrtc.so")
    ]
    search = os.pathsep.join([*nvrtc, os.environ.get("LD_LIBRARY_PATH", "")])
    return environment(ATTN_DISPATCH_CUDNN=library, LD_LIBRARY_PATH=search)


if __name__ == "__main__":
    main()
