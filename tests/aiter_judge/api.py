"""aiter_api.h for ctypes, read from the header itself, and a library that exports it."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from aiter_judge.build import ADAPTER

_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "void*": ctypes.c_void_p,
    "float*": ctypes.c_void_p,
    "int32_t*": ctypes.c_void_p,
    "uint64_t*": ctypes.c_void_p,
}
_MESSAGE = 1000


@lru_cache(maxsize=1)
def _structs() -> dict[str, type[ctypes.Structure]]:
    text = re.sub(r"//.*", "", (ADAPTER / "aiter_api.h").read_text())
    made: dict[str, type[ctypes.Structure]] = {}
    for name in ("AttnAiterCall", "AttnAiterForward", "AttnAiterBackward"):
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
        assert body, name
        fields = []
        for declaration in filter(None, map(str.strip, body[1].split(";"))):
            *kind, field = declaration.removeprefix("const ").split()
            plain = " ".join(kind).removeprefix("struct ")
            fields.append((field, made.get(plain) or _TYPES[plain]))
        made[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return made


def forward_struct() -> Any:
    return _structs()["AttnAiterForward"]()


def backward_struct() -> Any:
    return _structs()["AttnAiterBackward"]()


_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
)
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32)
_ARCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32
)


class _Table(ctypes.Structure):
    _fields_ = (
        ("api_version", ctypes.c_int32),
        ("generation", ctypes.c_char_p),
        ("device_arch", _ARCH),
        ("forward", _RUN),
        ("backward", _RUN),
        ("forward_takes_asm", _ASK),
        ("backward_takes_asm", _ASK),
    )


class Library:
    """judge.so or capture.so, on a GPU of the kind it is told."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        self._library.judge_take_records.restype = ctypes.c_char_p
        self._library.attn_dispatch_aiter.restype = ctypes.POINTER(_Table)
        self.table = self._library.attn_dispatch_aiter().contents

    def set_gpu(self, arch: str, compute_units: int | None = None) -> None:
        units = compute_units or {"gfx942": 304, "gfx950": 256}.get(arch, 100)
        self._library.judge_set_gpu(arch.encode(), units)

    def set_device(self, device: int) -> None:
        self._library.judge_set_device(device)

    def set_error(self, error: int) -> None:
        self._library.judge_set_error(error)

    def device_arch(self, size: int = 64) -> str:
        arch, message = ctypes.create_string_buffer(64), ctypes.create_string_buffer(_MESSAGE)
        failed = self.table.device_arch(arch, size, message, _MESSAGE)
        return message.value.decode() if failed else arch.value.decode()

    def run(self, call: Any, stream: int | None = None) -> tuple[str, list[str]]:
        """A sentence if it failed, and what was recorded."""
        message = ctypes.create_string_buffer(_MESSAGE)
        run = self.table.backward if _is_backward(call) else self.table.forward
        failed = run(ctypes.addressof(call), stream, message, _MESSAGE)
        records = self.take_records()
        assert failed in (0, 1)
        assert bool(failed) == bool(message.value)
        return message.value.decode(), records

    def takes_asm(self, call: Any) -> bool:
        message = ctypes.create_string_buffer(_MESSAGE)
        backward = _is_backward(call)
        ask = self.table.backward_takes_asm if backward else self.table.forward_takes_asm
        answer = ask(ctypes.addressof(call), message, _MESSAGE)
        assert answer in (0, 1), message.value.decode()
        return bool(answer)

    def take_records(self) -> list[str]:
        return self._library.judge_take_records().decode().splitlines()


def _is_backward(call: Any) -> bool:
    return type(call).__name__ == "AttnAiterBackward"
