"""The handlers of rocm_backend on an NVIDIA GPU, compiled against HIP's headers for NVIDIA.

The handlers' sources are those for AMD, and XLA's streams are real. HIP's functions call CUDA's,
and the emulator's arithmetic in CUDA kernels stands in for AITER. This tests what a CPU cannot:
calls that only queue work, memory that the host cannot read, and CUDA graphs.

usage:

    pip install --no-deps --target build/cuda12 nvidia-cuda-runtime-cu12==12.9.79 \\
      nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-cccl-cu12==12.9.27 \\
      nvidia-cuda-profiler-api-cu12==12.9.79
    PYTHONPATH=dispatch python -m tests.scripts.hip_on_nvidia build/cuda12 [FFI headers]

The script builds the module for the Python that runs it, and prints its path, which
tests/gpu/test_hip_on_nvidia.py needs. The build needs nvcc 13 and HIP's headers (Debian:
libamdhip64-dev, of HIP 5.2) but no GPU. HIP 5.2's headers name functions that CUDA 13 has removed,
so the handlers are compiled with CUDA 12's headers; the two functions that they call are the same
in both. The FFI headers, `jaxlib/include`, should be those of the oldest jaxlib: a module built
with them runs with every newer one.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

import jax
import pybind11

from attn_dispatch import aiter
from tests.support import aiter_emulated
from tests.support.emulator import build
from tests.support.emulator.native import Emulator
from tests.support.repository import ROOT

VARIABLE = "ATTN_DISPATCH_HIP_ON_NVIDIA"
"""The environment variable that names the module in a test run."""


def build_module(cuda12: Path | str, ffi_headers: Path | str | None = None) -> Path:
    """Build the handlers and the emulator's CUDA kernels as one Python module.

    `cuda12` is the folder into which pip has put CUDA 12's headers.
    """
    name = f"_rocm_on_cuda{build.module_suffix()}"
    headers = [
        *Path(cuda12, "nvidia").glob("*/include"),
        ffi_headers or jax.ffi.include_dir(),
        pybind11.get_include(),
        sysconfig.get_path("include"),
    ]
    command = [
        build.compiler(),
        *build.FLAGS,
        "-D__HIP_PLATFORM_NVIDIA__",
        f"-DATTN_DISPATCH_MODULE={aiter_emulated.NAME}",
        "-DATTN_DISPATCH_NOTE_BUFFER=attn_emulator_note_buffer",
        *(f"-isystem{folder}" for folder in headers),
        f"-I{ROOT / 'common_backend'}",
        f"-include{build.HERE / 'cuda' / 'texture_references.h'}",
        f"-include{build.HERE / 'emulator_buffers.h'}",
    ]
    sources = [aiter_emulated.ROCM_BACKEND / f"{stem}.cc" for stem in aiter_emulated.HANDLERS]
    handlers = build.compile_objects(command, sources, build.FOLDER / f"{name}.objects")
    flags = [
        *(f"-I{folder}" for folder in build.INCLUDE_DIRS),
        "-Xcompiler=-fvisibility=hidden",
        "-Xlinker=--exclude-libs=ALL",
    ]
    return build.build_with_nvcc(name, [*build.CUDA_SOURCES, *handlers], flags)


@lru_cache
def emulator(path: str) -> Emulator:
    """The emulator in this module. The first call registers its custom calls for XLA's GPUs."""
    path = str(Path(path).resolve())
    jax.devices("cuda")  # handlers are registered after the platform is up
    module = aiter_emulated.load_module(Path(path))
    for gfx in ("gfx942", "gfx950"):
        module.load_aiter(path, gfx)
    aiter.register_handlers(module, "CUDA")
    found = Emulator(path)
    found.library.attn_emulator_cuda_load.restype = ctypes.c_char_p
    outcome = found.library.attn_emulator_cuda_load().decode()
    assert outcome == "no error", outcome
    return found


if __name__ == "__main__":
    print(build_module(*sys.argv[1:]))
