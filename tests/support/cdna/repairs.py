"""Kernels with the waits, barriers and bounds that they lack."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.support.cdna.code_object import CodeObject
from tests.support.cdna.decoder import Code, Instruction, decode
from tests.support.cdna.disassembler import Line
from tests.support.cdna.machine import Machine

_S61 = 61
"""The high half of the bytes by which a start moves; s60 is the low one."""
_NO_LOAD_OF_LDS = 63
"""The immediate of s_waitcnt lgkmcnt(0): any number of vector loads may be in flight."""


class RepairedMachine(Machine):
    """A machine that repairs the kernels it loads."""

    def load(self, path: Path, part: str = "") -> tuple[CodeObject, Code]:
        is_new = (path, part) not in self.loaded
        kernel, code = super().load(path, part)
        if is_new:
            for pattern, repair in _REPAIRS:
                if re.match(pattern, f"{kernel.arch}/{path.stem}"):
                    code = repair(code, self.ops)
            self.loaded[path, part] = kernel, code
        return self.loaded[path, part]


def _with_waits(code: Code, ops: Mapping[str, int]) -> Code:
    """An s_waitcnt in the place of each s_nop after a barrier that follows ds_read."""
    places = _places(code, ops, ("ds_read_b32", "s_barrier", "s_nop"))
    assert places
    for place in places:
        code.instructions[place + 2] = _instruction(
            code, place + 2, ops["s_waitcnt"], _NO_LOAD_OF_LDS
        )
    return code


def _with_barrier_at_the_end(code: Code, ops: Mapping[str, int]) -> Code:
    """A barrier after the last stores of a block, before the next block starts.

    It takes the place of a branch to the next instruction where there is one.
    """
    end = _places(code, ops, ("s_waitcnt",))[-2]
    if code.instructions[end - 1].target == end:
        code.instructions[end - 1] = _instruction(code, end - 1, ops["s_barrier"])
        return code
    return _inserted(code, end + 1, _instruction(code, end, ops["s_barrier"]))


def _with_reduced_bounds(code: Code, ops: Mapping[str, int]) -> Code:
    """The bounds of dK's and dV's buffers, s38 and s42, move with their starts, as in _group."""
    for start, bound in ((37, 38), (41, 42)):
        for moved, changed in (("s_addc_u32", "s_sub_u32"), ("s_subb_u32", "s_add_u32")):
            lines = ("s_lshr_b32 s60, s60, 2", f"{changed} s{bound}, s{bound}, s60")
            added = decode([Line(0, x) for x in lines], ops).instructions
            for place in range(len(code.instructions) - 1, -1, -1):
                it = code.instructions[place]
                if it.op == ops[moved] and it.operands[0].index == start:
                    if _S61 in (it.operands[1].index, it.operands[2].index):
                        code = _inserted(code, place + 1, *added)
    return code


def _with_barriers_after_keys(code: Code, ops: Mapping[str, int]) -> Code:
    """A barrier between the reads of each of the first two tiles of keys and the next load."""
    for reads in _places(code, ops, ("s_barrier", "ds_read_b128"))[1::-1]:
        end = next(x for x in _places(code, ops, ("s_waitcnt",)) if x > reads)
        code = _inserted(code, end + 1, _instruction(code, end, ops["s_barrier"]))
    return code


_REPAIRS = (
    ("gfx942/.*_dq_convert", _with_waits),
    ("gfx950/fwd_hd192_hd128", _with_barriers_after_keys),
    ("gfx950/(fwd|bwd_hd128).*_causal", _with_barrier_at_the_end),
    ("gfx950/bwd_hd128_.*_causal_br_a32_psskddv$", _with_reduced_bounds),
)
"""The kernels that each repair is for."""


def _places(code: Code, ops: Mapping[str, int], names: Sequence[str]) -> list[int]:
    """Where these instructions stand one after the other."""
    found = [x.op for x in code.instructions]
    wanted = [ops[name] for name in names]
    return [n for n in range(len(found)) if found[n : n + len(wanted)] == wanted]


def _instruction(code: Code, place: int, op: int, immediate: int = 0) -> Instruction:
    return Instruction(op=op, immediate=immediate, address=code.instructions[place].address)


def _inserted(code: Code, place: int, *added: Instruction) -> Code:
    """The code with instructions before the one at a place. Branches to that one skip them."""
    before = list(code.instructions)
    after = (Instruction * (len(before) + len(added)))(*before[:place], *added, *before[place:])
    for instruction in after:
        instruction.target += len(added) * (instruction.target >= place)
    numbers = {x: n + len(added) * (n >= place) for x, n in code.numbers.items()}
    return replace(code, instructions=after, numbers=numbers)
