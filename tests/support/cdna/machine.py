"""The interpreter of gfx942's and gfx950's machine code, compiled, and launches on it."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from tests.support.cdna.code_object import CodeObject, read
from tests.support.cdna.decoder import Code, Instruction, decode
from tests.support.cdna.disassembler import disassemble
from tests.support.emulator import build
from tests.support.extent import EVERY_SIZE

HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.cc")))
# -O3 takes twice as long to compile, which only hours of runs pay back. Products are rounded before
# they are summed.
FLAGS = ("-std=c++20", "-O3" if EVERY_SIZE else "-O2", "-ffp-contract=off")
CHOSEN = os.environ.get("ATTN_DISPATCH_TEST_CDNA")
"""A library to test in place of the compiled one: tests/scripts/mutate_cdna.py makes wrong ones."""

Landing = Literal["at once", "late", "random", "timed"]
_LANDINGS: tuple[Landing, ...] = ("at once", "late", "random", "timed")
_CHECK_CONFLICTS, _CHECK_REGISTERS = 1, 2
_ARGUMENTS = -2


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_uint64), ("end", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    """machine.h's Launch."""

    _fields_ = [
        ("code", ctypes.POINTER(Instruction)),
        ("ranges", ctypes.POINTER(_Range)),
        ("sgprs", ctypes.POINTER(ctypes.c_uint32)),
        *(
            (x, ctypes.c_uint64)
            for x in ("most_instructions", "instructions_run", "lds_out_of_range")
        ),
        *(
            (x, ctypes.c_int32)
            for x in ("length", "ranges_length", "entry", "sgprs_length", "group_id_mask")
        ),
        ("grid", ctypes.c_int32 * 3),
        *(
            (x, ctypes.c_int32)
            for x in ("threads", "lds_bytes", "flushes_denormals", "landing", "lds_queue",
                      "quantum", "seed", "checks")
        ),
        ("fill", ctypes.c_uint32),
    ]  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """The order of events in a workgroup, and what is checked."""

    landing: Landing = "at once"
    """When loads and stores take place: as late as s_waitcnt lets them, after a random time, or
    after one that is like hardware's."""
    lds_queue: bool = True
    """Whether LDS takes a workgroup's accesses in the order of their issue."""
    quantum: int = 0
    """Instructions of a wave before another's turn; 0 runs it to its next barrier."""
    seed: int = 0
    """Of all that is random. With 0 waves take turns, with -1 backwards."""
    conflicts: bool = False
    """Whether accesses of two waves to one dword of LDS with no barrier between are noted."""
    registers: bool = False
    """Whether using a register before the s_waitcnt that covers its load is an error."""
    fill: int = 0
    """The bits of registers and LDS at the start."""
    most_instructions: int = 10**9
    """Of a launch; one that runs more is stopped."""


AT_ONCE = Schedule()
"""Waves take turns, and all takes place when it is issued."""


@dataclass(frozen=True)
class Result:
    instructions: int
    lds_out_of_range: int
    conflicts: list[str]


class Wrong(Exception):
    """The kernel did what no right kernel does."""


@lru_cache(maxsize=1)
def compiled() -> Path:
    """The interpreter's library."""
    return Path(CHOSEN) if CHOSEN else build.build("libcdna", SOURCES, flags=FLAGS)


@dataclass
class Machine:
    library: Path = field(default_factory=compiled)

    def __post_init__(self) -> None:
        self._native = ctypes.CDLL(str(self.library))
        self._native.cdna_op.restype = ctypes.c_char_p
        names = itertools.takewhile(bool, map(self._native.cdna_op, itertools.count()))
        self.ops = {name.decode(): n for n, name in enumerate(names)}
        self.loaded: dict[tuple[Path, str], tuple[CodeObject, Code]] = {}

    def load(self, path: Path, part: str = "") -> tuple[CodeObject, Code]:
        """A kernel of a file, that with `part` in its name.

        Its descriptor must allocate the registers that it names.
        """
        if (path, part) not in self.loaded:
            kernel = read(path, part)
            lines = disassemble(kernel.code, kernel.code_address, kernel.arch)
            code = decode(lines, self.ops, kernel.image.ctypes.data)
            if not _allocates(kernel, code):
                raise Wrong(f"{path}: registers that its descriptor does not allocate")
            self.loaded[path, part] = kernel, code
        return self.loaded[path, part]

    def run(
        self,
        kernel: CodeObject,
        code: Code,
        *,
        grid: tuple[int, int, int],
        threads: int,
        arguments: bytes,
        buffers: Sequence[tuple[int, int]],
        schedule: Schedule = AT_ONCE,
    ) -> Result:
        """Run all workgroups of a launch. `buffers`: address and bytes of what it may touch."""
        # HIP copies as many bytes as the kernel's metadata says, whatever AITER's struct has.
        size = kernel.kernarg_bytes
        held = ctypes.create_string_buffer(arguments[:size].ljust(size, b"\0"), size)
        image = kernel.image.ctypes.data, kernel.image.nbytes
        places = [*buffers, (ctypes.addressof(held), size), image]
        ranges = (_Range * len(places))(*((start, start + size) for start, size in places))
        sgprs = np.array(_user_sgprs(kernel, ctypes.addressof(held)), np.uint32)
        launch = _Launch(
            code=code.instructions, length=len(code.instructions),
            ranges=ranges, ranges_length=len(places),
            sgprs=sgprs.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)), sgprs_length=len(sgprs),
            entry=code.numbers[kernel.entry], group_id_mask=kernel.group_id_mask,
            grid=grid, threads=threads, lds_bytes=kernel.lds_bytes,
            flushes_denormals=kernel.flushes_denormals,
            most_instructions=schedule.most_instructions,
            landing=_LANDINGS.index(schedule.landing), lds_queue=schedule.lds_queue,
            quantum=schedule.quantum, seed=schedule.seed, fill=schedule.fill,
            checks=_CHECK_CONFLICTS * schedule.conflicts | _CHECK_REGISTERS * schedule.registers,
        )  # fmt: skip
        message = ctypes.create_string_buffer(1 << 16)
        failed = self._native.cdna_run(ctypes.byref(launch), message, len(message))
        text = message.value.decode()
        if failed:
            raise Wrong(f"{kernel.name}: {text}")
        return Result(launch.instructions_run, launch.lds_out_of_range, text.splitlines())


def _allocates(kernel: CodeObject, code: Code) -> bool:
    """Whether the registers that the code names exist. Accumulators follow the others."""
    vectors, accumulators = code.vector_registers()
    if not accumulators:
        return vectors <= kernel.vgprs
    return vectors <= kernel.first_agpr and accumulators <= kernel.vgprs - kernel.first_agpr


def _user_sgprs(kernel: CodeObject, arguments: int) -> list[int]:
    numbers: list[int] = []
    for size in kernel.user_sgprs:
        low_and_high = [arguments & 0xFFFFFFFF, arguments >> 32]
        numbers += low_and_high if size == _ARGUMENTS else [0] * size
    return numbers
