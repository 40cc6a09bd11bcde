"""A library that exports aiter_api.h, with the functions that fake_hip.cc adds."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from tests.support.emulator.native import Backward, Forward, SplitKv, Table

_MESSAGE = 1000


def forward_struct() -> Any:
    return Forward()


def backward_struct() -> Any:
    return Backward()


def split_kv_struct() -> Any:
    return SplitKv()


class Library:
    """A library, dispatch.so or capture.so, with the GPUs that a test sets."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        self._library.fake_hip_take_records.restype = ctypes.c_char_p
        self._library.fake_hip_take_launches.restype = ctypes.c_char_p
        self._library.attn_dispatch_aiter.restype = ctypes.POINTER(Table)
        self.table = self._library.attn_dispatch_aiter().contents

    def set_gpu(self, arch: str, compute_units: int | None = None) -> None:
        units = compute_units or {"gfx942": 304, "gfx950": 256}.get(arch, 100)
        self._library.fake_hip_set_gpu(arch.encode(), units)

    def set_gpu_of(self, device: int, arch: str) -> None:
        """Set the GPU of one device, after `set_gpu` has set all of them."""
        units = {"gfx942": 304, "gfx950": 256}[arch]
        self._library.fake_hip_set_gpu_of(device, arch.encode(), units)

    def set_asm_folder(self, arch: str, folder: str) -> None:
        self._library.fake_hip_set_asm_folder(arch.encode(), folder.encode())

    def set_hip_version(self, major: int) -> None:
        self._library.fake_hip_set_hip_version(major)

    def set_launch_error(self, error: int) -> None:
        self._library.fake_hip_set_launch_error(error)

    def fail_call(self, name: str, after: int) -> None:
        """Let HIP's function of this name fail once, after `after` calls that succeed."""
        self._library.fake_hip_fail_call(name.encode(), after)

    def last_error(self) -> int:
        return self._library.fake_hip_last_error()

    def set_device(self, device: int) -> None:
        self._library.fake_hip_set_device(device)

    def set_error(self, error: int) -> None:
        self._library.fake_hip_set_error(error)

    def device_arch(self, size: int = 64) -> str:
        arch, message = ctypes.create_string_buffer(64), ctypes.create_string_buffer(_MESSAGE)
        failed = self.table.device_arch(arch, size, message, _MESSAGE)
        return message.value.decode() if failed else arch.value.decode()

    def run(self, call: Any, stream: int | None = None) -> tuple[str, list[str]]:
        """Run a call. Returns the sentence of a failure, or "", and the record."""
        message = ctypes.create_string_buffer(_MESSAGE)
        run = self.table.backward if _is_backward(call) else self.table.forward
        if isinstance(call, SplitKv):
            run = self.table.split_kv
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

    def take_launches(self) -> list[tuple[tuple[int, ...], bytes]]:
        """The grid and block (x, y, z, block x) of each ASM kernel launched, and its arguments."""
        lines = self._library.fake_hip_take_launches().decode().splitlines()
        parts = [line.split() for line in lines]
        return [(tuple(map(int, x[:4])), bytes.fromhex(x[4])) for x in parts]

    def take_records(self) -> list[str]:
        return self._library.fake_hip_take_records().decode().splitlines()


def _is_backward(call: Any) -> bool:
    return isinstance(call, Backward)
