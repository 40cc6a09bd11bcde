"""The files of ASM kernels (.co): ELF files, each with one kernel for one architecture."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.devices import code_files

_HEADER = struct.Struct("<5s13xH20xQI6xHH2x")
"""Magic and class, machine, place of the section headers, flags, their size and number."""
_MAGIC, _MACHINE = b"\x7fELF\x02", 224
_ARCHS = {0x4C: "gfx942", 0x4F: "gfx950"}
"""By the low byte of the flags."""
_SHOWN = 3


def problem(folder: Path, arch: str, expected: int) -> str:
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
    bad = [(path, why) for path in kernels if (why := _problem(path, arch))]
    if not bad:
        return ""
    shown = "; ".join(f"{path.relative_to(folder)}: {why}" for path, why in bad[:_SHOWN])
    return f"{len(bad)} of the {len(kernels)} ASM kernels in {folder} cannot be used: {shown}"


def _problem(path: Path, arch: str) -> str:
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
