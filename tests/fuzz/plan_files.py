"""Drawn files in the folder of plans, which are read for a call or replaced.

A stand-in takes the place of cuDNN and accepts a line only if it is the one that it has written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from attn_dispatch.cudnn import plan_store
from tests.fuzz import mutations, strange_files

_PLAN = ("engine 6", 4096)
_ATTRIBUTES = {"seq_len_q": 128}


class _Backend:
    """A backend that plans one call and imports only the line that it has exported."""

    class CudnnError(Exception):
        pass

    def __init__(self, line: str) -> None:
        self._line, self.built, self.is_planned = line, 0, False

    def plan_key(self, attributes: Mapping[str, Any], properties: str) -> str:
        return f"{attributes} {properties}"

    def has_plan(self, attributes: Mapping[str, Any], properties: str) -> bool:
        return self.is_planned

    def plan(self, attributes: Mapping[str, Any], properties: str) -> tuple[str, int]:
        self.built += not self.is_planned
        self.is_planned = True
        return _PLAN

    def import_plan(self, attributes: Mapping[str, Any], properties: str, line: str) -> None:
        if line != self._line:
            raise self.CudnnError("no plan of this call")
        self.is_planned = True

    def export_plan(self, attributes: Mapping[str, Any], properties: str) -> str:
        return self._line


def draw(seed: int) -> str:
    """Damage one file. Returns whether its plan was read, or was built and written again."""
    random = Random(seed)
    line = '{"key": "µ", "plan": "' + random.randbytes(random.choice((8, 8, 200_000))).hex() + '"}'
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {plan_store.FOLDER: folder}),
    ):
        assert _planned(line) == 1
        (file,) = Path(folder).iterdir()
        is_whole = _damaged(random, file, line)
        built = _planned(line)
        assert built == (not is_whole)
        can_be_replaced = not file.is_dir() or file.is_symlink()
        assert (plan_store.write_failures(Path(folder)) == []) == can_be_replaced
        assert _planned(line) == (not can_be_replaced), "the next process reads it"
        return "built anew" if built else "read"


def _planned(line: str) -> int:
    """The number of plans that a new process builds."""
    backend: Any = _Backend(line)
    assert plan_store.plan(backend, _ATTRIBUTES, "properties") == _PLAN
    return backend.built


def _damaged(random: Random, file: Path, line: str) -> bool:
    """Damage the file, or not. Returns whether it still holds the right plan."""
    content = file.read_bytes()
    kind = random.randrange(6)
    if kind == 0:
        return True
    if kind == 1:
        file.unlink()
        strange_files.make(random, file, content)
        return False
    if kind == 2:  # other users may write to the file
        file.chmod(random.choice((0o602, 0o620, 0o622, 0o666)))
        return False
    if kind == 3:  # the checksum is right, but the plan is not
        other = mutations.damaged(random, line.encode())
        file.write_bytes(plan_store._checksum(other) + b"\n" + other)
        return other == line.encode()
    if kind == 4:
        file.write_bytes(content + b"x" * random.choice((1, 2**20)))
        return False
    damaged = mutations.damaged(random, content)
    file.write_bytes(damaged)
    return damaged == content
