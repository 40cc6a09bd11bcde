"""Finds AITER and loads it with `_rocm`, once per process and architecture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

from attn_dispatch.aiter import code_objects
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
    remedy = f"run `attn-dispatch build-aiter --arch {arch}`"
    try:
        build = aiter_folder.read(folder)
    except ValueError as error:
        return AiterLibrary(None, str(path), str(error))
    if build is None:
        return AiterLibrary(
            None,
            str(path),
            f"AITER is not built for {arch}: {remedy} ({folder} has no finished build)",
        )
    if build.arch != arch or build.generation not in GENERATIONS:
        built = f"AITER {build.generation[:80]!r} for {build.arch[:80]!r}"
        return AiterLibrary(None, str(path), f"{folder} has {built}: {remedy}")
    if build.compile_check_only:
        return AiterLibrary(
            None,
            str(path),
            f"{folder} was built without ROCm, to check that it compiles: {remedy} with ROCm "
            "installed",
        )
    if not os.path.isfile(path):  # opening a pipe would wait
        missing = f"AITER's library is missing, or no file: {path}; {remedy}"
        return AiterLibrary(None, str(path), missing)
    problems = (
        code_files.library_problem(folder / x, is_named=True) for x in aiter_folder.libraries(arch)
    )
    if problem := next(filter(None, problems), ""):
        return AiterLibrary(None, str(path), f"AITER's library {problem}; {remedy}")
    kernels = aiter_folder.asm_folder(folder, arch)
    if not os.path.isdir(kernels):  # also False for a folder without permission
        missing = f"AITER's ASM kernels are missing from {kernels}: {remedy}"
        return AiterLibrary(None, str(path), missing)
    if unusable := code_objects.problem(kernels, arch, build.asm_kernels):
        return AiterLibrary(None, str(path), f"{unusable}: {remedy}")
    try:
        # The library finds its kernels beside the path that it is loaded by, on its first call.
        backend.load_aiter(path.absolute(), arch)
    except RuntimeError as error:
        return AiterLibrary(None, str(path), str(error))
    return AiterLibrary(backend, str(path))
