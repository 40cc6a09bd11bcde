"""Build of the emulator, alone or in one module with rocm_backend, if its sources changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.repository import ROOT

HERE = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "emulator"

SELFTEST = HERE / "selftest.cc"
SOURCES = tuple(sorted(set(HERE.glob("*.cc")) - {SELFTEST}))
CUDA_SOURCES = (
    HERE / "cuda" / "emulator.cu",
    *(source for source in SOURCES if source.name not in ("cpu.cc", "hip.cc")),
)
CUDA_HIP = HERE / "cuda" / "hip.cc"
INCLUDE_DIRS = (HERE, HERE / "hip", ROOT / "rocm_backend", ROOT / "common_backend")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")

SANITIZE = os.environ.get("ATTN_DISPATCH_TEST_SANITIZE", "").split()
"""Flags of sanitizers, set by tests/scripts/sanitize.py; such builds have another folder."""
if SANITIZE:
    FLAGS, FOLDER = (*FLAGS, *SANITIZE), ROOT / "build" / "sanitize" / "emulator"


def library() -> Path:
    """Build the emulator alone: a library that exports attn_dispatch_aiter and its hooks."""
    return build("libattn_emulator", SOURCES)


def cuda_library() -> Path:
    """Build the emulator for NVIDIA GPUs, with HIP's calls as CUDA's: needs nvcc but no GPU."""
    includes = [f"-I{folder}" for folder in INCLUDE_DIRS]
    return build_with_nvcc("libattn_emulator_cuda.so", [*CUDA_SOURCES, CUDA_HIP], includes)


def build_with_nvcc(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Build a library of CUDA and C++ sources and objects, with CUDA's runtime inside."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["nvcc", "-std=c++17", "-O2", "-arch=sm_90", "-shared", "-Xcompiler=-fPIC", *flags]
    _run([*command, *map(str, sources), "-o", str(FOLDER / name)])
    return FOLDER / name


def build(
    name: str,
    sources: Sequence[Path],
    include_dirs: Sequence[Path | str] = (),
    defines: Sequence[str] = (),
    system_include_dirs: Sequence[Path | str] = (),
    flags: Sequence[str] = (),
    suffix: str = ".so",
) -> Path:
    """Build a shared library of these sources, unless it is up to date.

    `defines` have the form "NAME=value". A Python module needs `suffix=module_suffix()`, and the
    headers of pybind11 and XLA in `system_include_dirs`, whose warnings are not shown. The sources,
    and headers next to them or in `include_dirs`, are hashed to see what changed. Processes that
    build the same library wait for each other.
    """
    includes = [*INCLUDE_DIRS, *map(Path, include_dirs)]
    command = [compiler(), *FLAGS, *flags]
    command += [f"-D{define}" for define in defines]
    command += [f"-I{folder}" for folder in includes]
    command += [f"-isystem{folder}" for folder in system_include_dirs]
    FOLDER.mkdir(parents=True, exist_ok=True)
    built = FOLDER / f"{name}{suffix}"
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = FOLDER / f"{name}.stamp"
        now = _fingerprint(command, sources, includes)
        if built.exists() and stamp.exists() and stamp.read_text() == now:
            return built
        stamp.unlink(missing_ok=True)
        _compile(command, sources, built)
        stamp.write_text(now)
    return built


def module_suffix() -> str:
    return sysconfig.get_config_var("EXT_SUFFIX")


def compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise RuntimeError("the AITER emulator needs a C++ compiler: no g++ or c++ on PATH")
    return compiler


def _fingerprint(command: list[str], sources: Sequence[Path], includes: Sequence[Path]) -> str:
    folders = {source.parent for source in sources} | {Path(folder) for folder in includes}
    headers = {header for folder in folders for header in folder.rglob("*.h")}
    digest = hashlib.sha256("\0".join(command).encode())
    for path in sorted({*sources, *headers}):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _compile(command: list[str], sources: Sequence[Path], built: Path) -> None:
    """Compile objects in parallel, link them, and replace the library atomically.

    A process that has loaded the old library keeps it.
    """
    targets = compile_objects(command, sources, FOLDER / f"{built.name}.objects")
    linked = built.with_name(f"{built.name}.new")
    _run([*command, "-shared", *map(str, targets), "-ldl", "-o", str(linked)])
    linked.replace(built)


def compile_objects(command: list[str], sources: Sequence[Path], objects: Path) -> list[Path]:
    """Compile the sources to objects in a folder that holds nothing else."""
    shutil.rmtree(objects, ignore_errors=True)
    objects.mkdir(parents=True)
    targets = [objects / f"{i}-{source.stem}.o" for i, source in enumerate(sources)]
    steps = [
        [*command, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, targets, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(_run, steps))
    return targets


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
