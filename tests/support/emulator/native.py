"""aiter_api.h and the emulator's hooks through ctypes; the structs are parsed from the header."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.repository import ROOT

API = ROOT / "rocm_backend" / "aiter_api.h"

_MESSAGE_SIZE = 1024
_TYPES: dict[str, type] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "const char*": ctypes.c_char_p,
}


def _read_structs() -> dict[str, type[ctypes.Structure]]:
    """All structs except AttnAiter, a table of functions. Pointers become void*."""
    text = re.sub(r"//[^\n]*", "", API.read_text())
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", text, re.DOTALL):
        if "(*" in body:
            continue
        fields: list[tuple[str, type]] = []
        for kind, field in re.findall(r"([\w ]+?\*?)\s+(\w+);", body):
            kind = kind.strip().removeprefix("struct ")
            plain = _TYPES.get(kind) or structs.get(kind)
            fields.append((field, plain or ctypes.c_void_p))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


def _read_constants() -> dict[str, int]:
    found = re.findall(r"(ATTN_AITER_\w+)(?: = | )(\d+)", API.read_text())
    return {name.removeprefix("ATTN_AITER_"): int(value) for name, value in found}


STRUCTS = _read_structs()
CONSTANTS = _read_constants()
Call, Forward, Backward, SplitKv = (
    STRUCTS[f"AttnAiter{x}"] for x in ("Call", "Forward", "Backward", "SplitKv")
)
_KINDS = {"forward": (0, Forward), "backward": (1, Backward), "split_kv": (3, SplitKv)}
"""The number of each kind of call in emulator.h, and its struct."""

_Run = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
)
_Ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32)
_Arch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32
)

_Serve = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
)
Server = Callable[[ctypes.Structure], str | None]


class Table(ctypes.Structure):
    """The struct AttnAiter."""

    _fields_ = [
        ("api_version", ctypes.c_int32),
        ("generation", ctypes.c_char_p),
        ("arch", ctypes.c_char_p),
        ("device_arch", _Arch),
        ("forward", _Run),
        ("backward", _Run),
        ("split_kv", _Run),
        ("forward_takes_asm", _Ask),
        ("backward_takes_asm", _Ask),
    ]


class Refused(Exception):
    """Raised with the message if the emulator refuses a call or HIP fails."""


class Emulator:
    """The emulator in a library or Python module that contains one."""

    def __init__(self, path: Path | str) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.attn_dispatch_aiter.restype = ctypes.POINTER(Table)
        self.library.attn_emulator_calls.restype = ctypes.c_int64
        self._aiter = self.library.attn_dispatch_aiter().contents
        self.api_version = self._aiter.api_version
        self.generation = self._aiter.generation.decode()

    def run(self, call: ctypes.Structure) -> None:
        serve = getattr(self._aiter, next(x for x, (_, y) in _KINDS.items() if type(call) is y))
        message = ctypes.create_string_buffer(_MESSAGE_SIZE)
        if serve(ctypes.addressof(call), None, message, _MESSAGE_SIZE):
            raise Refused(message.value.decode())

    def takes_asm(self, call: ctypes.Structure) -> bool:
        is_forward = isinstance(call, Forward)
        ask = self._aiter.forward_takes_asm if is_forward else self._aiter.backward_takes_asm
        message = ctypes.create_string_buffer(_MESSAGE_SIZE)
        answer = ask(ctypes.addressof(call), message, _MESSAGE_SIZE)
        if answer < 0:
            raise Refused(message.value.decode())
        return bool(answer)

    def device_arch(self) -> str:
        arch, message = ctypes.create_string_buffer(64), ctypes.create_string_buffer(_MESSAGE_SIZE)
        if self._aiter.device_arch(arch, 64, message, _MESSAGE_SIZE):
            raise Refused(message.value.decode())
        return arch.value.decode()

    def note_buffer(self, buffer: np.ndarray) -> None:
        self.library.attn_emulator_note_buffer(
            ctypes.c_void_p(buffer.ctypes.data), ctypes.c_int64(buffer.nbytes)
        )

    def set_arch(self, arch: str) -> None:
        self.library.attn_emulator_set_arch(arch.encode())

    def set_generation(self, generation: str) -> None:
        self.library.attn_emulator_set_generation(generation.encode())

    def offer_newer(self, offers: bool) -> None:
        """Make the next library that is loaded from here one of generation v0.1.15."""
        self.library.attn_emulator_offer_newer(int(offers))

    def set_asm_answer(self, answer: int) -> None:
        self.library.attn_emulator_set_asm_answer(answer)

    def set_server(self, server: Server | None) -> None:
        """Hand calls to a function, until `reset`.

        It gets a struct and returns "", or the sentence of a failure, or None to leave the call to
        the emulator.
        """

        def serve(kind: int, call: int, message: int, size: int) -> int:
            struct = next(x for number, x in _KINDS.values() if number == kind)
            assert server is not None
            sentence = server(struct.from_address(call))
            if sentence is None:
                return -1
            written = sentence.encode()[: size - 1] + b"\0"
            ctypes.memmove(message, written, len(written))
            return bool(sentence)

        self._server = _Serve(serve) if server else _Serve()  # held here while C may call it
        self.library.attn_emulator_set_server(self._server)

    def noted_buffers(self) -> list[tuple[int, int]]:
        """The start and the bytes of each buffer of the call that this thread is in."""
        found: list[tuple[int, int]] = []
        start, size = ctypes.c_uint64(), ctypes.c_int64()
        noted = self.library.attn_emulator_noted_buffer
        while noted(len(found), ctypes.byref(start), ctypes.byref(size)):
            found.append((start.value, size.value))
        return found

    def fail_next(self, message: str) -> None:
        self.library.attn_emulator_fail_next(message.encode())

    def reset(self) -> None:
        self.library.attn_emulator_reset()

    def calls(self, kind: str) -> int:
        return self.library.attn_emulator_calls(
            ("forward", "backward", "memset", "split_kv").index(kind)
        )

    def last_call(self, kind: str) -> ctypes.Structure | None:
        index, struct = _KINDS[kind]
        call = struct()
        size = ctypes.c_int64(ctypes.sizeof(call))
        found = self.library.attn_emulator_last_call(index, ctypes.byref(call), size)
        return call if found else None

    def keep(
        self, rng_state: tuple[int, int], rate: float, shape: tuple[int, int, int, int]
    ) -> np.ndarray:
        """The dropout mask [sequences, heads, queries, keys], True = kept."""
        seed, offset = map(ctypes.c_uint64, rng_state)
        kept = [
            self.library.attn_emulator_keep(seed, offset, *at, ctypes.c_float(rate))
            for at in np.ndindex(shape)
        ]
        return np.array(kept, bool).reshape(shape)
