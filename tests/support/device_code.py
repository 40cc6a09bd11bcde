"""The GPU code inside a shared library, read without ROCm's tools."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_ELF_MACHINE_AMDGPU = 224
# EF_AMDGPU_MACH_AMDGCN_GFX942 and ..._GFX950 of llvm/BinaryFormat/ELF.h
_MACHINES = {0x04C: "gfx942", 0x04F: "gfx950"}


@dataclass(frozen=True)
class CodeObject:
    """One ELF file with code for a GPU."""

    bundle_entry: str
    """The file's name in the bundle, which ends with the GPU's."""
    machine: str
    """The GPU that the ELF header names."""
    kernels: tuple[str, ...]
    size: int


def code_objects(library: Path) -> Iterator[CodeObject]:
    """Every code object in the offload bundles of a library."""
    data = library.read_bytes()
    for bundle in re.finditer(_BUNDLE, data):
        start, at = bundle.start(), bundle.end()
        (count,) = struct.unpack_from("<Q", data, at)
        at += 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, at)
            entry = data[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if size and not entry.startswith("host"):
                yield _code_object(entry, data[start + offset : start + offset + size])


def _code_object(entry: str, elf: bytes) -> CodeObject:
    assert elf[:4] == b"\x7fELF", entry
    (machine,) = struct.unpack_from("<H", elf, 18)
    assert machine == _ELF_MACHINE_AMDGPU, machine
    (flags,) = struct.unpack_from("<I", elf, 48)
    names = sorted({name.decode() for name in re.findall(rb"\0([\w.$]+)\.kd(?=\0)", elf)})
    return CodeObject(entry, _MACHINES.get(flags & 0xFF, hex(flags)), tuple(names), len(elf))
