"""The cache of plans: one build for all who ask, and no memory of a failure that may pass."""

from __future__ import annotations

import subprocess
from pathlib import Path

from compiled import compiled, needs_compiler

HERE = Path(__file__).parent
BACKEND = HERE.parent / "cuda_backend"


@needs_compiler
def test_what_is_kept_and_what_is_forgotten(tmp_path: Path):
    program = compiled(
        tmp_path / "once_cache", "-std=c++17", "-g", "-pthread", f"-I{BACKEND}",
        f"-I{HERE.parent / 'common_backend'}",
        HERE / "cuda_checks" / "once_cache.cc", BACKEND / "failure.cc",
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stdout + done.stderr


@needs_compiler
def test_threads_inside_cudnn_when_the_process_ends_or_forks(tmp_path: Path):
    program = compiled(
        tmp_path / "visits", "-std=c++17", "-g", "-pthread", f"-I{BACKEND}",
        f"-I{HERE.parent / 'common_backend'}",
        HERE / "cuda_checks" / "visits.cc", BACKEND / "visit.cc",
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, timeout=90)
    assert done.stdout == "ok\na destructor ran\n", done.stdout + done.stderr
    stays = subprocess.run([program, "stay"], capture_output=True, text=True, timeout=90)
    assert (stays.stdout, stays.returncode) == ("ok\n", 3), stays.stdout + stays.stderr
