"""Worker processes and their cases; a crash fails only the case that caused it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import BY_NAME
from attn_dispatch_tools.verify.outcome import Outcome

SECONDS_PER_CASE = 300.0
"""The time after which a worker that has not answered counts as stuck."""

_CASES_PER_GROUP = 8

_COMPILE_QUICKLY = (
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_disable_gpuasm_optimizations=true",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_optimization_level=0",
    "--xla_gpu_force_compilation_parallelism=1",
)
"""Each case compiles a program that computes little beside the kernels; with these flags a thousand
cases take half the time (H100). XLA_FLAGS of the environment override them."""

_STDERR_LINES = 15

_BROKEN = ("CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress")
"""Errors after which every later case in the same process would fail as well."""


def run(
    cases: Sequence[Case],
    worker: Sequence[str],
    jobs: int,
    *,
    seconds_per_case: float = SECONDS_PER_CASE,
) -> Iterator[Outcome]:
    """The outcome of every case, in the order in which they are done.

    Args:
      cases: what to run.
      worker: the command line of a worker; see worker.py.
      jobs: the number of workers at a time.
      seconds_per_case: the time after which a worker is killed and its case counted as crashed.
    """
    groups: queue.SimpleQueue[Sequence[Case]] = queue.SimpleQueue()
    for group in _groups(cases):
        groups.put(group)
    outcomes: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
    stopped = threading.Event()

    workers = [_Worker(worker, seconds_per_case) for _ in range(min(jobs, len(cases)))]
    threads = [
        threading.Thread(target=_work, args=(x, groups, outcomes, stopped), daemon=True)
        for x in workers
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in cases:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        stopped.set()
        for process in workers:
            process.stop()
        for thread in threads:
            thread.join()


def _work(
    process: _Worker,
    groups: queue.SimpleQueue[Sequence[Case]],
    outcomes: queue.SimpleQueue[Outcome | BaseException],
    stopped: threading.Event,
) -> None:
    """Run one group of cases after the other, in a thread of each worker process."""
    try:
        while not stopped.is_set():
            for case in groups.get_nowait():
                if not stopped.is_set():
                    outcomes.put(process.answer(case))
    except queue.Empty:
        pass
    except BaseException as error:
        outcomes.put(error)
    finally:
        process.end()


def _groups(cases: Sequence[Case]) -> list[Sequence[Case]]:
    """Groups of a few cases of one shape: what a worker compiles for one case serves the others."""
    by_shape: dict[Any, list[Case]] = {}
    for case in cases:
        shape = (case.b, case.t, case.s, case.n, case.k, case.h, case.v, case.dtype)
        by_shape.setdefault((*shape, case.soft_cap is None), []).append(case)
    groups = [
        alike[first : first + _CASES_PER_GROUP]
        for alike in by_shape.values()
        for first in range(0, len(alike), _CASES_PER_GROUP)
    ]
    return sorted(groups, key=len, reverse=True)


class _Worker:
    """One worker process, and a new one after it has died."""

    def __init__(self, command: Sequence[str], seconds_per_case: float) -> None:
        self._command, self._seconds = command, seconds_per_case
        self._environment = _environment()
        self._process: subprocess.Popen[str] | None = None
        self._stderr: Any = None

    def stop(self) -> None:
        """Kill the process, from another thread; the case in progress then counts as crashed."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """Kill the process and close its pipes."""
        if self._process is not None:
            self._process.kill()
            self._close()

    def answer(self, case: Case) -> Outcome:
        """The outcome of a case; if the process died, a crash with its last lines of stderr."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._seconds, give_up)
        timer.start()
        try:
            in_table = BY_NAME.get(case.name) == case
            process.stdin.write((case.name if in_table else json.dumps(case.to_json())) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            outcome = Outcome.from_json(json.loads(line))
            if any(x in failure for failure in outcome.failures for x in _BROKEN):
                self.end()
            return outcome
        ended = _ending(process.wait())
        if is_late.is_set():
            ended = f"no answer within {self._seconds:g} s"
        stderr = self._close()
        return Outcome(case.name, case.family, "crashed", (f"{ended}\n{stderr}".strip(),))

    def _start(self) -> subprocess.Popen[str]:
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env=self._environment, text=True, process_group=0,  # Ctrl-C reaches only this process
        )  # fmt: skip
        return self._process

    def _close(self) -> str:
        """Close the pipes of a dead process; returns the last lines that it wrote to stderr."""
        process, self._process = self._process, None
        assert process is not None
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self._stderr.seek(0)
        lines = self._stderr.read().splitlines()[-_STDERR_LINES:]
        self._stderr.close()
        return "\n".join(lines)


def _environment() -> dict[str, str]:
    """The environment of a worker; workers share the device's memory and the processor."""
    given = os.environ.get("XLA_FLAGS", "")
    defaults = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # The reference multiplies small matrices, for which threads wait for each other.
        "OPENBLAS_NUM_THREADS": "1",
    }
    flags = {
        "XLA_FLAGS": " ".join((*_COMPILE_QUICKLY, given))
    }  # the later of two equal flags counts
    return defaults | os.environ | flags | {"ATTN_DISPATCH_POISON": "1"}


def _ending(code: int) -> str:
    if code >= 0:
        return f"the worker ended with exit status {code}"
    try:
        return f"the worker died of {signal.Signals(-code).name}"
    except ValueError:
        return f"the worker died of signal {-code}"


def command(implementation: str) -> list[str]:
    """The command line of a worker for this implementation."""
    return [sys.executable, "-m", "attn_dispatch_tools.verify.worker", implementation]
