"""rocm_backend compiles against HIP's real headers and contains no forbidden calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import jax
import pybind11
import pytest

from tests.support.aiter_emulated import HANDLERS, ROCM_BACKEND
from tests.support.repository import ROOT

HIP = next(
    (
        x
        for x in map(Path, (os.environ.get("ROCM_PATH", "/opt/rocm"), "/opt/rocm", "/usr"))
        if (x / "include/hip/hip_runtime_api.h").exists()
    ),
    None,
)


@pytest.mark.skipif(HIP is None, reason="needs HIP's headers (Debian: libamdhip64-dev)")
@pytest.mark.parametrize("name", HANDLERS)
def test_a_source_compiles_against_hip(name):
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None
    includes = [jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_path("include")]
    command = [
        compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
        "-D__HIP_PLATFORM_AMD__=1", *(f"-isystem{x}" for x in includes),
        f"-I{ROOT / 'common_backend'}", f"-idirafter{HIP}/include",
        str(ROCM_BACKEND / f"{name}.cc"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_handlers_do_not_allocate_wait_or_abort():
    """The names of calls that a handler must not make do not occur in its sources."""
    forbidden = ("hipMalloc", "hipFree", "Synchronize", "hipMemcpy", "abort(", "exit(", "throw ")
    for name in HANDLERS:
        text = (ROCM_BACKEND / f"{name}.cc").read_text()
        assert [x for x in forbidden if x in text] == [], name
