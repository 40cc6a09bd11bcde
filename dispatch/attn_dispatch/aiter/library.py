"""Finding AITER and the library that speaks to it, once per process and architecture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.devices import native as native_libraries


@dataclass(frozen=True)
class AiterLibrary:
    """AITER as this process uses it, or the reason why it cannot."""

    backend: ModuleType | None
    """`_rocm`, once it has loaded AITER."""
    path: str = ""
    unusable: str = ""

    @property
    def is_usable(self) -> bool:
        return self.backend is not None


@lru_cache
def find(arch: str) -> AiterLibrary:
    """Load `_rocm` and through it the AITER that was built for this architecture."""
    try:
        backend = native_libraries.load(native_libraries.ROCM)
    except ImportError as error:
        return AiterLibrary(None, unusable=str(error))
    return load(backend, arch)


def load(backend: ModuleType, arch: str) -> AiterLibrary:
    """Load AITER for this architecture into `backend`, and tell AITER where its kernels are."""
    folder = aiter_folder.folder(arch)
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
    if build.compile_check_only:
        return AiterLibrary(
            None,
            str(path),
            f"{folder} was built without ROCm, to check that it compiles: {remedy} with ROCm "
            "installed",
        )
    if missing := _point_to_kernels(folder, arch):
        return AiterLibrary(None, str(path), f"{missing}: {remedy}")
    if error := backend.load_aiter(str(path)):
        return AiterLibrary(None, str(path), error)
    return AiterLibrary(backend, str(path))


def _point_to_kernels(folder: Path, arch: str) -> str:
    """AITER throws where AITER_ASM_DIR is unset, and ends the process where a file is missing."""
    if chosen := os.environ.get("AITER_ASM_DIR"):
        if Path(chosen, "fmha_v3_fwd").is_dir():
            return ""
        return f"AITER_ASM_DIR is {chosen}, which has no kernels of attention; unset it, or"
    kernels = aiter_folder.asm_folder(folder, arch)
    if not Path(kernels).is_dir():
        return f"AITER's ASM kernels are missing from {kernels}"
    os.environ["AITER_ASM_DIR"] = kernels
    return ""
