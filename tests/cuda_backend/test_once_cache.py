"""The cache of plans: it builds a value once for all threads, and keeps no transient failure."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.compiled import compiled, needs_compiler
from tests.support.repository import ROOT

HERE = Path(__file__).parent
BACKEND = ROOT / "cuda_backend"


def check(folder: Path, name: str, source: str) -> Path:
    """The program of tests/cuda_backend/NAME.cc, with one file of the library."""
    headers = (f"-I{BACKEND}", f"-I{BACKEND.parent / 'common_backend'}")
    sources = (HERE / f"{name}.cc", BACKEND / source)
    return compiled(folder / name, "-std=c++17", "-g", "-pthread", *headers, *sources)


@needs_compiler
def test_what_is_kept_and_what_is_forgotten(tmp_path: Path):
    program = check(tmp_path, "once_cache", "cudnn_failure.cc")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stdout + done.stderr


@needs_compiler
def test_threads_inside_cudnn_when_the_process_ends_or_forks(tmp_path: Path):
    program = check(tmp_path, "cudnn_scope", "cudnn_scope.cc")
    done = subprocess.run([program], capture_output=True, text=True, timeout=90)
    assert done.stdout == "ok\na destructor ran\n", done.stdout + done.stderr
    stays = subprocess.run([program, "stay"], capture_output=True, text=True, timeout=90)
    assert (stays.stdout, stays.returncode) == ("ok\n", 3), stays.stdout + stays.stderr
