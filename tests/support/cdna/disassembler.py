"""Machine code as text, by LLVM's library."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

LIBRARIES = tuple(f"libLLVM.so.{major}.1" for major in (22, 23, 21, 20))
"""The versions that know gfx950. Debian's clang-22 brings the first."""


class Line(NamedTuple):
    """One instruction."""

    address: int
    text: str


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """LLVM's library, or a sentence about what is missing."""
    for name in LIBRARIES:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        _declare(found)
        return found
    names = ", ".join(LIBRARIES)
    return f"machine code is not disassembled here: none of {names} (apt install clang-22)"


def _declare(llvm: ctypes.CDLL) -> None:
    for part in ("TargetInfo", "TargetMC", "Disassembler"):
        getattr(llvm, f"LLVMInitializeAMDGPU{part}")()
    create, disassemble = llvm.LLVMCreateDisasmCPU, llvm.LLVMDisasmInstruction
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    create.restype, disassemble.restype = pointer, ctypes.c_size_t
    create.argtypes = [text, text, pointer, ctypes.c_int, pointer, pointer]
    disassemble.argtypes = [
        pointer, pointer, ctypes.c_uint64, ctypes.c_uint64, text, ctypes.c_size_t
    ]  # fmt: skip
    llvm.LLVMDisasmDispose.argtypes = [pointer]


def disassemble(code: bytes, address: int, arch: str) -> list[Line]:
    """The instructions of code that is loaded at an address."""
    llvm = library()
    if isinstance(llvm, str):
        raise RuntimeError(llvm)
    context = llvm.LLVMCreateDisasmCPU(b"amdgcn-amd-amdhsa", arch.encode(), None, 0, None, None)
    memory = ctypes.create_string_buffer(code, len(code))
    text = ctypes.create_string_buffer(256)
    lines, at = [], 0
    try:
        while at < len(code):
            size = llvm.LLVMDisasmInstruction(
                context, ctypes.addressof(memory) + at, len(code) - at, address + at, text, 256
            )
            if not size:
                raise ValueError(f"no {arch} instruction at {address + at:#x}")
            lines.append(Line(address + at, text.value.decode().strip()))
            at += size
    finally:
        llvm.LLVMDisasmDispose(context)
    return lines
