"""Installing the results of a build: the libraries, the ASM kernels, and a record of both."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Sequence
from pathlib import Path

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.folder import GENERATION, AiterBuild
from attn_dispatch.devices import code_files
from attn_dispatch_tools.build_aiter.generate import Filters
from attn_dispatch_tools.build_aiter.toolchain import Toolchain
from attn_dispatch_tools.build_aiter.wheel import Wheel


def install(
    work: Path,
    folder: Path,
    arch: str,
    wheel: Wheel,
    toolchain: Toolchain,
    filters: Filters,
    files: int,
) -> AiterBuild:
    """Copy what was built in `work` into `folder`. The record is written last, and returned."""
    kernels = replace_files(folder, arch, work, aiter_folder.libraries(arch), wheel.asm(arch))
    build = AiterBuild(
        generation=GENERATION,
        arch=arch,
        wheel_version=wheel.version,
        filter_forward=filters.forward,
        filter_backward=filters.backward,
        filter_split_kv=filters.split_kv,
        compiler=toolchain.description,
        compile_check_only=toolchain.compile_check_only,
        files=files,
        asm_kernels=kernels,
        date=now(),
    )
    return record(folder, build)


def record(folder: Path, build: AiterBuild) -> AiterBuild:
    """Write the record of a build whose files are in place, and return it."""
    build.write(folder)
    return build


def now() -> str:
    """The date of a build."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def replace_files(
    folder: Path, arch: str, work: Path, libraries: Sequence[str], kernels: Path
) -> int:
    """Copy libraries and ASM kernels into `folder`. Returns the number of kernels.

    The record of an earlier build is removed first.
    """
    aiter_folder.forget(folder)
    for name in libraries:
        _replace(work / name, folder / name)
    return len(_copy_asm_kernels(kernels, folder, arch))


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
