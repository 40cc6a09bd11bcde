"""Planning processes for tests, a faulty one among them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.planning_process import PLANNER, PlanningProcess
from attn_dispatch.devices.target import parse
from tests.support.cudnn_calls import cudnn_attributes
from tests.support.repository import ROOT

CUDNN = cudnn_library._locate()

# Not needs_cudnn, which would skip the tests if the planning process does not start.
needs_planning_process = pytest.mark.skipif(
    importlib.util.find_spec("attn_dispatch._cuda") is None or not Path(CUDNN).exists(),
    reason="needs attn_dispatch._cuda and cuDNN",
)

SM90 = parse("sm90").properties or ""
SMALL = cudnn_attributes(batch=1, num_heads=2, num_kv_heads=2, seq_len_q=128, seq_len_kv=128)

FAULTY_PLANNER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(PLANNER.parent)!r})
import planner
real = planner.answer

def answer(backend, line):
    if '"batch": 13' in line:
        print("first", "second", "third", "fourth: assertion failed", sep="\\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if '"batch": 14' in line:
        time.sleep(60)
    return real(backend, line)

planner.answer = answer
planner.main()
"""
"""A planning process that crashes on a batch of 13 and is busy for a minute on a batch of 14."""


def native() -> Any:
    return importlib.import_module("attn_dispatch._cuda")


def started_process() -> Iterator[PlanningProcess]:
    """The body of a fixture: a planning process with cuDNN loaded."""
    process = PlanningProcess(native())
    assert process.load_cudnn(CUDNN) >= 91200
    yield process
    end(process)


def faulty_process(folder: Path) -> Iterator[PlanningProcess]:
    """The body of a fixture: FAULTY_PLANNER with cuDNN loaded."""
    script = folder / "faulty_planner.py"
    script.write_text(FAULTY_PLANNER)
    process = PlanningProcess(native(), script)
    process.load_cudnn(CUDNN)
    yield process
    end(process)


def end(process: PlanningProcess) -> None:
    if process._helper is not None:
        process._helper.end()


def pid_of(process: PlanningProcess) -> int:
    assert process._helper is not None
    return process._helper._process.pid


def state_of(pid: int | str) -> str:
    """The state that ps shows, or Z (zombie) if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def run(code: str, *arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a new process, with the repository on its path."""
    code = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code, ROOT, *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ | changes,
    )  # fmt: skip


def output_of(code: str, *arguments: str | Path, **changes: str) -> list[str]:
    done = run(code, *arguments, **changes)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()
