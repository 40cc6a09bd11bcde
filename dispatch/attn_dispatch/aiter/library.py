"""Finds AITER and loads it with `_rocm`, once per process and architecture.

The ASM kernels (.co) beside the library are ELF files, each with one kernel for one architecture.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import GENERATIONS, Release
from attn_dispatch.devices import code_files, native_libraries


@dataclass(frozen=True)
class AiterLibrary:
    """AITER as this process uses it, or the reason why it cannot."""

    backend: ModuleType | None
    """`_rocm`, with AITER loaded; None if it is not usable."""
    path: str = ""
    unusable_reason: str = ""
    """Why AITER cannot be used; empty if it can."""

    @property
    def is_usable(self) -> bool:
        return self.backend is not None


def find(arch: str, release: Release | None = None) -> AiterLibrary:
    """Load `_rocm` and through it the AITER that was built for this architecture.

    The result is cached, but not a failure to load: later, AITER may be built or memory be free.

    Args:
      arch: the architecture, such as "gfx942".
      release: one of `folder.releases`; None is the first.
    """
    try:
        return _load(arch, release)
    except _NotLoaded as failure:
        return failure.library


class _NotLoaded(Exception):
    def __init__(self, library: AiterLibrary) -> None:
        super().__init__(library.unusable_reason)
        self.library = library


@lru_cache
def _load(arch: str, release: Release | None) -> AiterLibrary:
    try:
        backend = native_libraries.load(native_libraries.ROCM)
    except ModuleNotFoundError as error:
        return AiterLibrary(None, unusable_reason=str(error))
    except ImportError as error:
        raise _NotLoaded(AiterLibrary(None, unusable_reason=str(error))) from error
    library = load(backend, arch, release)
    if not library.is_usable:
        raise _NotLoaded(library)
    return library


def load(backend: ModuleType, arch: str, release: Release | None = None) -> AiterLibrary:
    """Load AITER for this architecture into `backend`."""
    folder = aiter_folder.folder_of(release or aiter_folder.release(arch), arch)
    path = folder / aiter_folder.ADAPTER
    if why := _problem(folder, arch):
        return AiterLibrary(None, str(path), why)
    try:
        # The library finds its kernels beside the path that it is loaded by, on its first call.
        backend.load_aiter(path.absolute(), arch)
    except RuntimeError as error:
        return AiterLibrary(None, str(path), str(error))
    return AiterLibrary(backend, str(path))


def _problem(folder: Path, arch: str) -> str:
    """Why the build in a folder cannot be loaded; empty if it may be."""
    remedy = f"run `attn-dispatch build-aiter --arch {arch}`"
    try:
        build = aiter_folder.read(folder)
    except ValueError as error:
        return str(error)
    if build is None:
        return f"AITER is not built for {arch}: {remedy} ({folder} has no finished build)"
    if build.arch != arch or build.generation not in GENERATIONS:
        built = f"AITER {build.generation[:80]!r} for {build.arch[:80]!r}"
        return f"{folder} has {built}: {remedy}"
    if build.compile_check_only:
        why = "was built without ROCm, to check that it compiles"
        return f"{folder} {why}: {remedy} with ROCm installed"
    return _problem_of_files(folder, arch, build.asm_kernels, remedy)


def _problem_of_files(folder: Path, arch: str, asm_kernels: int, remedy: str) -> str:
    path = folder / aiter_folder.ADAPTER
    if not os.path.isfile(path):  # opening a pipe would wait
        return f"AITER's library is missing, or no file: {path}; {remedy}"
    problems = (
        code_files.library_problem(folder / x, is_named=True) for x in aiter_folder.libraries(arch)
    )
    if problem := next(filter(None, problems), ""):
        return f"AITER's library {problem}; {remedy}"
    kernels = aiter_folder.asm_folder(folder, arch)
    if not os.path.isdir(kernels):  # also False for a folder without permission
        return f"AITER's ASM kernels are missing from {kernels}: {remedy}"
    unusable = unusable_kernels(kernels, arch, asm_kernels)
    return unusable and f"{unusable}: {remedy}"


_HEADER = struct.Struct("<5s13xH20xQI6xHH2x")
"""Magic and class, machine, place of the section headers, flags, their size and number."""
_MAGIC, _MACHINE = b"\x7fELF\x02", 224
_ARCHS = {0x4C: "gfx942", 0x4F: "gfx950"}
"""By the low byte of the flags."""
_SHOWN = 3


def unusable_kernels(folder: Path, arch: str, expected: int) -> str:
    """Why the ASM kernels in a folder cannot be used; empty if they can.

    HIP is not asked: it may end the process over a file that is cut off or of another architecture.

    Args:
      folder: AITER's folder for one architecture.
      arch: that architecture.
      expected: the least number of kernels.
    """
    kernels = aiter_folder.asm_kernels(folder)
    if len(kernels) < expected:
        return f"{folder} has {len(kernels)} of AITER's {expected} ASM kernels"
    bad = [(path, why) for path in kernels if (why := _damage(path, arch))]
    if not bad:
        return ""
    shown = "; ".join(f"{path.relative_to(folder)}: {why}" for path, why in bad[:_SHOWN])
    return f"{len(bad)} of the {len(kernels)} ASM kernels in {folder} cannot be used: {shown}"


def _damage(path: Path, arch: str) -> str:
    """Why a file cannot be used as a kernel for the architecture; empty if it can."""
    try:
        with path.open("rb") as file:
            facts, start = os.fstat(file.fileno()), file.read(_HEADER.size)
    except OSError as error:
        return error.strerror or str(error)
    if untrusted := code_files.untrusted(facts):
        return untrusted
    if not facts.st_size:
        return "empty"
    if len(start) < _HEADER.size:
        return "cut off"
    magic, machine, sections, flags, section_size, number = _HEADER.unpack(start)
    if (magic, machine) != (_MAGIC, _MACHINE):
        return "no code object of an AMD GPU"
    if (made_for := _ARCHS.get(flags & 0xFF, "another architecture")) != arch:
        return f"for {made_for}"
    return "cut off" if facts.st_size < sections + section_size * number else ""
