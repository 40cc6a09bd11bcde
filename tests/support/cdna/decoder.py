"""Instructions as LLVM writes them, as the structs of machine.h."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.support.cdna.disassembler import Line

FIRST_AGPR = 256
_NONE, SGPR, VGPR, _CONSTANT = range(4)
QUAD_PERM, _SELECTS = 8, 16
_FLAGS = {"idxen": 1, "offen": 2, "lds": 4}
TO_LDS = _FLAGS["lds"]
_NAMED = {
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1),
    "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
}  # fmt: skip
_WITHOUT_MEANING = {"s_setprio"}
_MOST_VECTOR, _MOST_OTHER = 63, 15


class Operand(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("kind", "index", "width", "negate", "absolute")]


class Instruction(ctypes.Structure):
    _fields_ = [
        *((x, ctypes.c_int32) for x in ("op", "flags", "immediate", "target", "address")),
        ("operands", Operand * 5),
    ]


@dataclass(frozen=True)
class Code:
    instructions: ctypes.Array[Instruction]
    numbers: Mapping[int, int]
    """The number of the instruction at each address."""

    def vector_registers(self) -> tuple[int, int]:
        """How many vector registers and accumulators the code needs."""
        ends = {
            x.index + x.width
            for instruction in self.instructions
            for x in instruction.operands
            if x.kind == VGPR
        }
        vectors = max((x for x in ends if x <= FIRST_AGPR), default=0)
        return vectors, max((x - FIRST_AGPR for x in ends if x > FIRST_AGPR), default=0)


class _Parsed(NamedTuple):
    """An instruction's operands, and what its modifiers say."""

    operands: str
    immediate: int = 0
    flags: int = 0


def mnemonic(line: Line) -> str:
    """An instruction's name without its encoding, as the interpreter has it."""
    return re.sub(r"_(e32|e64|dpp|sdwa)$", "", line.text.partition(" ")[0])


def decode(lines: Sequence[Line], ops: Mapping[str, int], start: int = 0) -> Code:
    """The instructions of some lines.

    Args:
      lines: as LLVM writes them.
      ops: the interpreter's number of each mnemonic.
      start: where the address 0 of the lines is in memory.
    """
    numbers = {line.address: n for n, line in enumerate(lines)}
    instructions = (Instruction * len(lines))()
    for instruction, line in zip(instructions, lines, strict=True):
        op, text = mnemonic(line), line.text.partition(" ")[2]
        if op not in ops:
            raise NotImplementedError(f"{line.text} at {line.address:#x}")
        instruction.op, instruction.address = ops[op], line.address
        if op in _WITHOUT_MEANING:
            continue
        if "branch" in op:
            instruction.target = numbers[line.address + 4 + 4 * _signed(int(text), 16)]
        elif op == "s_nop":
            instruction.immediate = int(text)
        elif op == "s_waitcnt":
            instruction.immediate = _counts(text)
        elif op == "s_getpc_b64":
            instruction.operands[0] = _operand(text.strip())
            after = start + line.address + 4
            instruction.operands[1] = Operand(_CONSTANT, _signed(after, 32), after >> 32)
        elif op == "s_setreg_imm32_b32":
            instruction.immediate = _denormals(text.strip())
        else:
            _fill(instruction, _modifiers(op, text.strip()))
    return Code(instructions, numbers)


def _fill(instruction: Instruction, parsed: _Parsed) -> None:
    instruction.flags, instruction.immediate = parsed.flags, parsed.immediate
    operands = [_operand(x) for x in parsed.operands.split(", ")] if parsed.operands else []
    if parsed.flags & TO_LDS:
        operands.insert(0, Operand(_NONE))  # data goes to no register
    for n, operand in enumerate(operands):
        instruction.operands[n] = operand


def _counts(text: str) -> int:
    counts = {name: int(count) for name, count in re.findall(r"(\w+)\((\d+)\)", text)}
    if not counts or counts.keys() - {"vmcnt", "lgkmcnt", "expcnt"}:
        raise NotImplementedError(f"s_waitcnt {text}")
    vector, other = counts.get("vmcnt", _MOST_VECTOR), counts.get("lgkmcnt", _MOST_OTHER)
    return vector | other << 8


def _denormals(text: str) -> int:
    """The bits of MODE that say whether float32 numbers are flushed; no other register is known.

    -1 if they say that float64 is rounded to the nearest number, which it always is here.
    """
    if text == "hwreg(HW_REG_MODE, 2, 2), 0":
        return -1
    found = re.fullmatch(r"hwreg\(HW_REG_MODE, 4, 2\), (\d)", text)
    if not found:
        raise NotImplementedError(f"s_setreg_imm32_b32 {text}")
    return int(found[1])


_QUAD = re.compile(r" quad_perm:\[(\d),(\d),(\d),(\d)\] row_mask:0xf bank_mask:0xf$")
_NEGATED = re.compile(r" neg_(lo|hi):\[(\d),(\d)(?:,(\d))?\]")
_SELECTED = re.compile(r" op_sel(_hi)?:\[(\d),(\d)(?:,(\d))?\]")
_PARTS = re.compile(r" dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:(\w+)(?: src1_sel:(\w+))?$")
_NUMBER_OF_PART = {
    **{f"BYTE_{n}": n for n in range(4)}, "WORD_0": 4, "WORD_1": 5, "DWORD": 6
}  # fmt: skip
_SIGN_OF_PART = 128
_WORDS = re.compile(r"((?: (?:idxen|offen|lds|offset[01]?:-?\d+))*)$")


def _modifiers(op: str, text: str) -> _Parsed:
    """Split off what follows the operands. An unknown modifier stays, and is no operand."""
    if quad := _QUAD.search(text):
        lanes = sum(int(lane) << 2 * n for n, lane in enumerate(quad.groups()))
        return _Parsed(text[: quad.start()], lanes, QUAD_PERM)
    if parts := _PARTS.search(text):
        return _of_parts(text[: parts.start()], parts.groups("DWORD"))
    if op.startswith("v_pk_"):
        return _selected(text)
    found = _WORDS.search(text)
    assert found is not None
    immediate, flags = 0, TO_LDS if op.startswith("global_load_lds") else 0
    for word in found[1].split():
        if word.startswith("offset"):
            name, _, number = word.partition(":")
            immediate |= int(number) << (16 if name == "offset1" else 0)
        else:
            flags |= _FLAGS[word]
    return _Parsed(text[: found.start()], immediate, flags)


def _of_parts(text: str, parts: Sequence[str]) -> _Parsed:
    """Sources of which a part is taken, with its sign where they are sext(v7)."""
    destination, *sources = text.split(", ")
    immediate = 0
    for n, (source, part) in enumerate(zip(sources, parts, strict=False)):
        sign = _SIGN_OF_PART if source.startswith("sext(") else 0
        immediate |= (_NUMBER_OF_PART[part] | sign) << 8 * n
    plain = [x.removeprefix("sext(").rstrip(")") for x in sources]
    return _Parsed(", ".join([destination, *plain]), immediate, _SELECTS)


def _selected(text: str) -> _Parsed:
    """Which registers make the low result, in bits 2:0, and which the high one, in bits 6:4.

    Their signs change by bits 10:8 and 14:12.
    """
    low, high, negative = 0, 7, 0
    for found in _NEGATED.finditer(text):
        bits = sum(int(x or 0) << n for n, x in enumerate(found.groups()[1:]))
        negative |= bits << (12 if found[1] == "hi" else 8)
    text = _NEGATED.sub("", text)
    for found in _SELECTED.finditer(text):
        bits = sum(int(x or 0) << n for n, x in enumerate(found.groups()[1:]))
        low, high = (low, bits) if found[1] else (bits, high)
    return _Parsed(_SELECTED.sub("", text), low | high << 4 | negative)


_SIGNED = re.compile(r"-(?=[vsa|])")
_REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])")


def _operand(text: str) -> Operand:
    """Any operand: -|v7|, s[2:3], vcc, 0x1f, 1.0, off."""
    negate = _SIGNED.match(text) is not None
    plain = text[negate:]
    absolute = plain.startswith("|")
    plain = plain.strip("|")
    if plain == "off":
        return Operand(_NONE)
    if plain in _NAMED:
        return Operand(SGPR, *_NAMED[plain], negate, absolute)
    if register := _REGISTER.fullmatch(plain):
        file, one, first, last = register.groups()
        index, width = (int(one), 1) if one else (int(first), int(last) - int(first) + 1)
        kind = SGPR if file == "s" else VGPR
        return Operand(kind, index + FIRST_AGPR * (file == "a"), width, negate, absolute)
    return Operand(_CONSTANT, _constant(plain), 1, negate, absolute)


def _constant(text: str) -> int:
    if re.fullmatch(r"-?\d+\.\d+", text):
        return struct.unpack("<i", struct.pack("<f", float(text)))[0]
    text = re.sub(r"^lit\((.+)\)$", r"\1", text)  # in four bytes, though a shorter form exists
    if re.fullmatch(r"-?(\d+|0x[0-9a-f]+)", text):
        return _signed(int(text, 0), 32)
    raise NotImplementedError(f"operand or modifier {text!r}")


def _signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (x >> bits - 1 << bits)
