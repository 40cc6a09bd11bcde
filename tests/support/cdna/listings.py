"""Short programs, written in tests, and what they leave in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.support.cdna.code_object import CodeObject
from tests.support.cdna.decoder import decode
from tests.support.cdna.disassembler import Line
from tests.support.cdna.machine import AT_ONCE, Machine, Result, Schedule

LANES = np.arange(64)
assert_same = np.testing.assert_array_equal
FIRST_INPUT, FIRST_RESULT = 8, 64
_ROW = 4 * len(LANES)
LDS_BYTES = 4096

_START = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_load_dwordx2 s[6:7], s[0:1], 0x8
    v_and_b32_e32 v1, 63, v0
    v_lshrrev_b32_e32 v2, 6, v0
    v_readfirstlane_b32 s8, v2
    v_lshlrev_b32_e32 v3, 2, v1
    v_mov_b32_e32 v0, v1
    s_waitcnt lgkmcnt(0)
"""
_ALL_LANES = "s_mov_b32 exec_lo, -1\ns_mov_b32 exec_hi, -1"


@lru_cache(maxsize=1)
def machine() -> Machine:
    return Machine()


@dataclass(frozen=True)
class Outcome:
    values: np.ndarray
    """The results [waves, registers, lanes], uint32."""
    memory: np.ndarray
    """The first rows of memory, in which the inputs were."""
    result: Result


def run(
    text: str,
    inputs: np.ndarray | Sequence[np.ndarray] = (),
    results: int = 1,
    *,
    waves: int = 1,
    flushes_denormals: bool = False,
    schedule: Schedule = AT_ONCE,
    start: int = 0,
) -> Outcome:
    """Run a program, which begins at `start`, in waves of one workgroup.

    It finds inputs [n, 64] in v8 and further, lane numbers in v0 and four times these in v3, the
    wave's number in v2 and s8, and in s[4:7] the descriptor of memory that begins with the inputs.
    It leaves its results in v64 and further.
    """
    rows = np.ascontiguousarray(inputs).view(np.uint32).reshape(-1, len(LANES))
    memory = np.zeros((len(rows) + waves * results, len(LANES)), np.uint32)
    memory[: len(rows)] = rows
    lines = _START.split("\n")
    for n in range(len(rows)):
        lines += [f"s_mov_b32 s9, {n * _ROW:#x}"]
        lines += [f"buffer_load_dword v{FIRST_INPUT + n}, v3, s[4:7], s9 offen"]
    lines += ["s_waitcnt vmcnt(0)", *text.split("\n"), *_ALL_LANES.split("\n")]
    lines += [f"s_mov_b32 s6, {memory.nbytes:#x}", f"s_mul_i32 s8, s8, {results * _ROW:#x}"]
    for n in range(results):
        lines += [f"s_add_u32 s9, s8, {(len(rows) + n) * _ROW:#x}"]
        lines += [f"buffer_store_dword v{FIRST_RESULT + n}, v3, s[4:7], s9 offen"]
    lines += ["s_endpgm"]
    code = decode(listing("\n".join(lines)), machine().ops, start)
    address = memory.ctypes.data
    descriptor = [address & 0xFFFFFFFF, address >> 32, memory.nbytes, 0x20000]
    result = machine().run(
        kernel(flushes_denormals=flushes_denormals), code,
        grid=(1, 1, 1), threads=64 * waves, schedule=schedule,
        arguments=np.array(descriptor, np.uint32).tobytes(), buffers=[(address, memory.nbytes)],
    )  # fmt: skip
    values = memory[len(rows) :].reshape(waves, results, len(LANES))
    return Outcome(values, memory[: len(rows)], result)


def listing(text: str) -> list[Line]:
    """Lines of a program, all as if they were four bytes long."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return [Line(4 * n, line) for n, line in enumerate(lines)]


def set_pair(register: int, x: int) -> str:
    """Set a pair of scalar registers."""
    return f"s_mov_b32 s{register}, {x & 0xFFFFFFFF:#x}\ns_mov_b32 s{register + 1}, {x >> 32:#x}"


def pair_and_code(text: str, start: int = 0) -> tuple[int, int]:
    """What a program that begins at `start` leaves in s[14:15], and the condition code."""
    text += "\ns_cselect_b32 s16, 1, 0"
    text += "".join(f"\nv_mov_b32_e32 v{64 + n}, s{14 + n}" for n in range(3))
    got = run(text, results=3, start=start).values[0, :, 0].astype(object)
    return got[0] | got[1] << 32, got[2]


def set_exec(mask: int) -> str:
    return f"s_mov_b32 exec_lo, {mask & 0xFFFFFFFF:#x}\ns_mov_b32 exec_hi, {mask >> 32:#x}"


def lanes_of(mask: int) -> np.ndarray:
    """The lanes of a mask, as booleans."""
    return np.array([bool(mask >> lane & 1) for lane in range(64)])


def kernel(*, flushes_denormals: bool = False) -> CodeObject:
    """A program's descriptor: its arguments' address is in s[0:1]."""
    return CodeObject(
        name="listing", arch="gfx950", code=b"", code_address=0, entry=0, lds_bytes=LDS_BYTES,
        kernarg_bytes=16, vgprs=512, first_agpr=256, flushes_denormals=flushes_denormals,
        group_id_mask=0, user_sgprs=(-2,),
    )  # fmt: skip
