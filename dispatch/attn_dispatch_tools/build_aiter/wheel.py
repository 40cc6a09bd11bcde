"""Finding the C++ sources of a build: those in the amd-aiter wheel, and this project's own."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import attn_dispatch
from attn_dispatch.aiter.folder import WHEEL_VERSION
from attn_dispatch.devices import native_libraries
from attn_dispatch_tools.terminal.building import BuildError

# Without --no-deps pip would install pandas and more, which only AITER's Python code needs.
_INSTALL = f"pip install --no-deps amd-aiter=={WHEEL_VERSION}"


@dataclass(frozen=True)
class Wheel:
    """The unpacked sources of AITER."""

    version: str
    meta: Path
    """The folder aiter_meta."""

    @property
    def csrc(self) -> Path:
        return self.meta / "csrc"

    @property
    def composable_kernel(self) -> Path:
        return self.meta / "3rdparty" / "composable_kernel"

    @property
    def fmha(self) -> Path:
        """CK's attention kernels and their generator."""
        return self.composable_kernel / "example" / "ck_tile" / "01_fmha"

    def asm(self, arch: str) -> Path:
        """The folder of an architecture's ASM kernels, and of the generators of their launchers."""
        return self.meta / "hsa" / arch

    @property
    def include_flags(self) -> tuple[str, ...]:
        folders = (
            self.meta / "3rdparty" / "ck_helper",
            self.composable_kernel / "include",
            self.composable_kernel / "library" / "include",
            self.csrc / "include",
            self.fmha,
        )
        return tuple(f"-I{folder}" for folder in folders)


def find() -> Wheel:
    """The installed wheel, or the one unpacked in $ATTN_DISPATCH_AITER_WHEEL.

    AITER itself is not imported: that would import PyTorch and look for a GPU.
    """
    unpacked = os.environ.get("ATTN_DISPATCH_AITER_WHEEL")
    places = [unpacked] if unpacked else sys.path
    found = next(iter(importlib.metadata.distributions(name="amd-aiter", path=places)), None)
    if found is None:
        place = f"ATTN_DISPATCH_AITER_WHEEL={unpacked} holds no" if unpacked else "there is no"
        raise BuildError(f"{place} amd-aiter wheel, which brings AITER's sources; {_INSTALL}")
    if found.version != WHEEL_VERSION:
        raise BuildError(
            f"expected amd-aiter {WHEEL_VERSION}, got {found.version}, whose C++ interface "
            f"differs; {_INSTALL}"
        )
    meta = Path(str(found.locate_file("aiter_meta")))
    if not meta.is_dir():
        raise BuildError(
            f"amd-aiter is installed, but {meta} is missing; {_INSTALL} --force-reinstall"
        )
    return Wheel(found.version, meta.resolve())


def adapter_sources(folder: Path, generation: str) -> tuple[Path, ...]:
    """This project's sources for a generation of AITER, in the folder of the adapter."""
    files = generation.replace(".", "_")
    return (*sorted(folder.glob("aiter_adapter*.cc")), *sorted(folder.glob(f"aiter_{files}_*.cc")))


ENVIRONMENT = ("aiter_environment.cc", "aiter_asm_folder.cc")
"""This project's sources that are part of each library, and replace functions that AITER calls."""


def environment_flags(arch: str, *, asm_root: bool = False) -> dict[str, tuple[str, ...]]:
    """Compiler flags for single sources of ENVIRONMENT, by file name.

    Args:
      arch: the architecture that is built for.
      asm_root: AITER expects the folder of all architectures' kernels, not that of one.
    """
    root = ("-DATTN_DISPATCH_AITER_ASM_ROOT",) if asm_root else ()
    return {ENVIRONMENT[1]: (f"-DATTN_DISPATCH_AITER_ARCH={arch}", *root)}


def adapter_folder() -> Path:
    """The folder of this project's C++ sources for AITER.

    It is in the installed package, in a checkout, or in the package attn-dispatch-rocm.
    """
    package = Path(attn_dispatch.__file__).resolve().parent
    places = (package, package.parents[1], *native_libraries.plugin_folders(native_libraries.ROCM))
    for folder in (place / "rocm_backend" for place in places):
        if (folder / "aiter_api.h").exists():
            return folder
    raise BuildError(
        "attn_dispatch was installed without the sources in rocm_backend; reinstall it from its "
        "checkout"
    )
