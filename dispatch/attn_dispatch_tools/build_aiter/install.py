"""Installing the results of a build: the libraries, the ASM kernels, and a record of both."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Sequence
from pathlib import Path

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.folder import AiterBuild
from attn_dispatch.devices import code_files
from attn_dispatch_tools.build_aiter.generate import Filters
from attn_dispatch_tools.build_aiter.toolchain import Toolchain


def install(
    folder: Path,
    toolchain: Toolchain,
    filters: Filters,
    *,
    generation: str,
    version: str,
    arch: str,
    libraries: Sequence[str],
    kernels: Path,
    files: int,
) -> AiterBuild:
    """Copy libraries from folder/work, and ASM kernels, into `folder`.

    The record of an earlier build is removed first. The new one is written last, and returned.

    Args:
      version: that of AITER's sources.
      kernels: the folder of the ASM kernels.
      files: the number of files that were compiled.
    """
    aiter_folder.forget(folder)
    for name in libraries:
        _replace(folder / "work" / name, folder / name)
    build = AiterBuild(
        generation=generation,
        arch=arch,
        wheel_version=version,
        filter_forward=filters.forward,
        filter_backward=filters.backward,
        filter_split_kv=filters.split_kv,
        compiler=toolchain.description,
        compile_check_only=toolchain.compile_check_only,
        files=files,
        asm_kernels=len(_copy_asm_kernels(kernels, folder, arch)),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    build.write(folder)
    return build


def _copy_asm_kernels(source: Path, folder: Path, arch: str) -> Sequence[Path]:
    """Copy the ASM kernels into the folder where the libraries look for them, and return them."""
    target = Path(aiter_folder.asm_folder(folder, arch))
    kernels = aiter_folder.asm_kernels(source)
    for kernel in kernels:
        copy = target / kernel.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        _replace(kernel, copy)
    return kernels


def _replace(source: Path, target: Path) -> None:
    """Replace a file by renaming, so that a process with the old file open is not disturbed."""
    draft = target.with_name(f"{target.name}.draft")
    shutil.copyfile(source, draft)
    code_files.deny_others(draft)
    draft.replace(target)
