"""PyTorch's scaled_dot_product_attention and, for masks, flex_attention, in a separate process.

In one process, JAX and torch would load two versions of cuDNN, and neither would free memory that
the other needs.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from attn_dispatch.files import reading
from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.cells import Cell

_WORKER = Path(__file__).with_name("torch_worker.py")
_ANSWER_SECONDS = 300
"""The time limit for an answer of the worker process."""


class Worker:
    """The process that runs torch_worker.py, started when it is first used."""

    def __init__(self, python: str | None):
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._about: dict[str, Any] | None = None
        self._ids = itertools.count()

    def about(self) -> dict[str, Any]:
        """The "version" of torch, or the "reason" why it cannot be used here."""
        if self._about is None:
            self._about = self._started()
        return self._about

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request to the process, and return its answer.

        Raises:
          RuntimeError: the process failed, with its reason, or did not answer.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise RuntimeError("its process has ended")
        try:
            process.stdin.write((json.dumps(request) + "\n").encode())
            process.stdin.flush()
        except OSError:
            self.close()
            raise RuntimeError("its process has ended") from None
        answer = self._answer(process)
        if "reason" in answer:
            raise RuntimeError(answer["reason"])
        return answer

    def new_id(self) -> str:
        return str(next(self._ids))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> dict[str, Any]:
        python = self._python or sys.executable
        if self._python is None and importlib.util.find_spec("torch") is None:
            return {"reason": "not installed: pip install torch, or name a --torch-python"}
        try:
            self._process = subprocess.Popen(
                [python, str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            return {"reason": f"{python} cannot be started: {error.strerror}"}
        try:
            about = self._answer(self._process)
        except RuntimeError as error:
            about = {"reason": str(error)}
        if "reason" in about:
            self.close()
        return about

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        line, until = b"", time.monotonic() + _ANSWER_SECONDS
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                self.close()
                raise RuntimeError(f"no answer within {_ANSWER_SECONDS} seconds")
            part = process.stdout.read(1 << 16)
            if not part:
                self.close()
                raise RuntimeError("its process has ended")
            line += part
        try:
            answer = reading.json_value(line.decode())
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise RuntimeError(f"its process answered {line[:80]!r}")
        return answer


class _TorchProgram:
    """A `MeasuredProgram` in the worker process."""

    def __init__(self, worker: Worker, backend: str, cell: Cell, direction: str):
        self._worker, self._id = worker, worker.new_id()
        self.facts: dict[str, Any] = worker.ask(
            do="prepare", id=self._id, backend=backend, cell=cell.to_json(), direction=direction
        )

    def seconds(self, calls: int) -> float:
        return self._worker.ask(do="seconds", id=self._id, calls=calls)["seconds"]

    def device_seconds(self, calls: int) -> tuple[float | None, str]:
        try:
            answer = self._worker.ask(do="device_seconds", id=self._id, calls=calls)
        except RuntimeError as error:
            return None, str(error)
        return answer["seconds"], ""

    def results(self) -> list[jax.Array] | None:
        return None  # torch draws other random inputs, so results cannot be compared


class TorchSdpa:
    """The call with one of its backends. All backends share a worker process."""

    def __init__(self, backend: str, worker: Worker):
        self.name = f"torch: {backend}"
        self._backend, self._worker = backend, worker

    def version(self) -> str:
        return self._worker.about().get("version", "")

    def absent(self) -> str:
        return self._worker.about().get("reason", "")

    def concerns(self, cell: Cell) -> bool:
        return (cell.mask is not None) == (self._backend == "flex")

    def notes(self, cell: Cell, arrays: CellArrays) -> dict[str, Any]:
        return {"called": "in a separate process"}

    def program(self, cell: Cell, direction: str, arrays: CellArrays) -> _TorchProgram:
        if cell.calls > 1:
            raise NotImplementedError("its process times single calls")
        if cell.lengths:
            raise NotImplementedError("scaled_dot_product_attention has no packed sequences")
        if cell.window is not None:
            raise NotImplementedError("scaled_dot_product_attention has no windows")
        return _TorchProgram(self._worker, self._backend, cell, direction)

    def release(self) -> None:
        """Free the arrays of all programs in the worker process."""
        if not self.absent():
            self._worker.ask(do="release")

    def close(self) -> None:
        self._worker.close()


def peers(python: str | None) -> tuple[TorchSdpa, ...]:
    worker = Worker(python)
    return tuple(TorchSdpa(backend, worker) for backend in ("cudnn", "flash", "flex"))
