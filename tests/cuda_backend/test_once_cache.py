"""The C++ tests of the cache of plans and of CudnnScope, compiled and run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.compiled import compiled, needs_compiler
from tests.support.repository import ROOT

HERE = Path(__file__).parent
BACKEND = ROOT / "cuda_backend"


def compile_program(folder: Path, name: str, source: str) -> Path:
    """Compile tests/cuda_backend/NAME.cc with one source file of the library."""
    headers = (f"-I{BACKEND}", f"-I{BACKEND.parent / 'common_backend'}")
    sources = (HERE / f"{name}.cc", BACKEND / source)
    return compiled(folder / name, "-std=c++17", "-g", "-pthread", *headers, *sources)


@needs_compiler
def test_the_cache_keeps_values_and_drops_transient_failures(tmp_path: Path):
    program = compile_program(tmp_path, "once_cache", "cudnn_failure.cc")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stdout + done.stderr


@needs_compiler
def test_threads_inside_cudnn_when_the_process_ends_or_forks(tmp_path: Path):
    program = compile_program(tmp_path, "cudnn_scope", "cudnn_scope.cc")
    done = subprocess.run([program], capture_output=True, text=True, timeout=90)
    assert done.stdout == "ok\na destructor ran\n", done.stdout + done.stderr
    stay = subprocess.run([program, "stay"], capture_output=True, text=True, timeout=90)
    assert (stay.stdout, stay.returncode) == ("ok\n", 3), stay.stdout + stay.stderr
