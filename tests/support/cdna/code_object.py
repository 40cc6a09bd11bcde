"""A kernel of a code object: its descriptor, and its code."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_ARCHS = {0x4C: "gfx942", 0x4F: "gfx950"}
_PROGRAM, _SYMBOLS, _ZEROS, _DYNAMIC_SYMBOLS = 1, 2, 8, 11
_LOADED, _EXECUTABLE = 2, 4
_USER_SGPRS = (4, 2, 2, 2, 2, 2, 1)
"""The registers of each thing that the descriptor asks for: the fourth is the arguments."""


@dataclass(frozen=True)
class Section:
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.size


@dataclass(frozen=True)
class CodeObject:
    """What a launch needs to know; LLVM's AMDGPUUsage names the fields of the descriptor."""

    name: str
    arch: str
    code: bytes
    code_address: int
    entry: int
    lds_bytes: int
    kernarg_bytes: int
    vgprs: int
    """Vector registers, the accumulators among them."""
    first_agpr: int
    """How many of them come before the accumulators."""
    flushes_denormals: bool
    group_id_mask: int
    user_sgprs: tuple[int, ...]
    """The numbers of registers before the workgroup's, in order; that of the arguments is -2."""
    image: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8), compare=False)
    """What is loaded of the file, at its addresses: kernels find constants from where they are."""


def read(path: Path, part: str = "") -> CodeObject:
    """The file's kernel; of several with the same arguments, the one with `part` in its name."""
    data = path.read_bytes()
    sections = list(_sections(data))
    symbols = {name: (value, size) for value, size, name in _symbols(data, sections)}
    (name,) = (x.removesuffix(".kd") for x in symbols if x.endswith(".kd") and part in x)
    descriptor, _ = symbols[f"{name}.kd"]
    (code,) = (x for x in sections if x.kind == _PROGRAM and x.flags & _EXECUTABLE)
    start, size = symbols[name] if part else (code.address, code.size)
    at_code = code.offset + start - code.address
    home = next(x for x in sections if x.holds(descriptor))
    at = home.offset + descriptor - home.address
    lds_bytes, private_bytes, _, _, entry = struct.unpack_from("<IIIIq", data, at)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", data, at + 44)
    # The IEEE bit, CK's kernels have it, changes signaling NaN alone.
    round_mode = rsrc1 >> 12 & 15
    if private_bytes or preload or round_mode:
        raise NotImplementedError(f"{path}: scratch, preloading, or a mode that is not modelled")
    (flags,) = struct.unpack_from("<I", data, 48)
    return CodeObject(
        name=name,
        arch=_ARCHS[flags & 0xFF],
        code=data[at_code : at_code + size],
        code_address=start,
        entry=descriptor + entry,
        lds_bytes=lds_bytes,
        kernarg_bytes=_kernarg_bytes(data),
        vgprs=((rsrc1 & 63) + 1) * 8,
        first_agpr=((rsrc3 & 63) + 1) * 4,
        flushes_denormals=not rsrc1 >> 16 & 3,
        group_id_mask=rsrc2 >> 7 & 7,
        user_sgprs=tuple(
            -size if bit == 3 else size
            for bit, size in enumerate(_USER_SGPRS)
            if properties >> bit & 1
        ),
        image=_image(data, sections),
    )


def _image(data: bytes, sections: list[Section]) -> np.ndarray:
    loaded = [x for x in sections if x.flags & _LOADED and x.kind != _ZEROS]
    image = np.zeros(max(x.address + x.size for x in loaded), np.uint8)
    for x in loaded:
        found = data[x.offset : x.offset + x.size]
        image[x.address : x.address + x.size] = np.frombuffer(found, np.uint8)
    return image


def _kernarg_bytes(data: bytes) -> int:
    """The size of the arguments, from the metadata in MessagePack; the descriptor may have 0."""
    key = b".kernarg_segment_size"
    at = data.index(key) + len(key)
    if data[at] < 0x80:
        return data[at]
    size = {0xCC: 1, 0xCD: 2}[data[at]]
    return int.from_bytes(data[at + 1 : at + 1 + size])


def _sections(data: bytes) -> Iterator[Section]:
    (start,) = struct.unpack_from("<Q", data, 40)
    size, number = struct.unpack_from("<HH", data, 58)
    for n in range(number):
        _, kind, flags, address, offset, length, link = struct.unpack_from(
            "<IIQQQQI", data, start + n * size
        )
        yield Section(kind, flags, address, offset, length, link)


def _symbols(data: bytes, sections: list[Section]) -> Iterator[tuple[int, int, str]]:
    """The value, the size and the name of each."""
    for table in sections:
        if table.kind not in (_SYMBOLS, _DYNAMIC_SYMBOLS):
            continue
        names = sections[table.link].offset
        for at in range(table.offset, table.offset + table.size, 24):
            name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", data, at)
            yield value, size, data[names + name : data.index(b"\0", names + name)].decode()
