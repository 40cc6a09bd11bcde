"""Compiles the emulator, alone or into a module with rocm_backend, where its sources changed."""

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
"""More flags, of sanitizers, which tests/scripts/sanitize.py sets; they build in another folder."""
if SANITIZE:
    FLAGS, FOLDER = (*FLAGS, *SANITIZE), ROOT / "build" / "sanitize" / "emulator"


def library() -> Path:
    """The emulator alone: a shared library that exports attn_dispatch_aiter and its hooks."""
    return build("libattn_emulator", SOURCES)


def cuda_library() -> Path:
    """The emulator for NVIDIA GPUs, with HIP's calls as CUDA's: needs nvcc, and no GPU."""
    includes = [f"-I{folder}" for folder in INCLUDE_DIRS]
    return build_with_nvcc("libattn_emulator_cuda.so", [*CUDA_SOURCES, CUDA_HIP], includes)


def build_with_nvcc(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """A shared library of CUDA and C++ sources and objects, with CUDA's runtime inside."""
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
    """A shared library of these sources. `defines` are such as "NAME=value".

    A Python module wants `suffix=module_suffix()`, and pybind11's and XLA's headers among
    `system_include_dirs`, whose warnings are not ours. Sources and headers next to them or in
    `include_dirs` are hashed: an up-to-date library is not built again. Processes that build the
    same thing wait for each other.
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
    """Objects side by side, then one link that replaces the library at once: a process that has
    the old one loaded keeps it."""
    targets = compile_objects(command, sources, FOLDER / f"{built.name}.objects")
    linked = built.with_name(f"{built.name}.new")
    _run([*command, "-shared", *map(str, targets), "-ldl", "-o", str(linked)])
    linked.replace(built)


def compile_objects(command: list[str], sources: Sequence[Path], objects: Path) -> list[Path]:
    """The sources' objects, in a folder that holds nothing else."""
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
