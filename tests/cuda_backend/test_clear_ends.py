"""The PTX of clear_ends.cc assembles, and a small interpreter of it clears the right rows."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.ptx import ARCHS, assemble
from tests.support.repository import ROOT

SOURCE = ROOT / "cuda_backend" / "clear_ends.cc"
HEADER = SOURCE.with_suffix(".h").read_text()
FOUND = re.search(r'kKernel\[\] = R"\((.*?)\)"', SOURCE.read_text(), re.DOTALL)
assert FOUND
PTX = FOUND[1]
PADDING, INVALID, KEPT = 7, 9, 1
OFFSETS, WORDS = 1000, 2000  # addresses
MASK = 2**64 - 1


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_assembles(tmp_path: Path, arch: str):
    done = assemble(PTX, tmp_path, arch)
    if f"Value '{arch}' is not defined" in done.stderr:
        pytest.skip(f"this ptxas does not know {arch}")
    assert done.returncode == 0, done.stderr


def test_the_kernels_name_and_parameter_match_its_launch():
    text = SOURCE.read_text()
    assert 'kernel(kKernel, "clear_ends")' in text and ".entry clear_ends(" in PTX
    (size,) = re.findall(r"sizeof\(EndsToClear\) == (\d+)", text)
    (most,) = re.findall(r"kMostEnds = (\d+);", HEADER)
    assert f".b8 arrays[{int(size) * int(most)}]" in PTX
    assert f"mul.wide.u32 %place, %block, {size};" in PTX


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


ARITHMETIC: dict[str, Callable[..., int | bool]] = {
    "mul": lambda x, y: x * y,
    "mad": lambda x, y, z: x * y + z,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "max": lambda x, y: max(signed(x), signed(y)),
    "min": lambda x, y: min(signed(x), signed(y)),
    "mov": lambda x: x,
    "cvt": lambda x: x,
    "cvta": lambda x: x,
    "setp.eq": lambda x, y: x == y,
    "setp.ge": lambda x, y: x >= y,
    "setp.gt": lambda x, y: signed(x) > signed(y),
    "setp.lt": lambda x, y: x < y,
}


@dataclass
class Thread:
    """A thread of the kernel. `memory` has words by address, and there are no others."""

    registers: dict[str, int]
    parameter: bytes
    memory: dict[int, int]

    def value(self, text: str) -> int:
        return self.registers[text] if text in self.registers else int(text)

    def address(self, text: str) -> int:
        base, _, offset = text.strip("[]").partition("+")
        return self.value(base) + int(offset or 0)

    def compute(self, name: str, given: list[str]) -> None:
        """Run an instruction that is no jump."""
        if name.startswith("st.global"):
            assert self.address(given[0]) in self.memory, "nothing outside of the arrays is written"
            self.memory[self.address(given[0])] = self.value(given[1])
            return
        if name.startswith("ld.param"):
            kind = "<Q" if name.endswith("64") else "<I"
            (found,) = struct.unpack_from(kind, self.parameter, self.address(given[1]))
        elif name.startswith("ld.global"):
            found = self.memory[self.address(given[1])]
        else:
            operation = ".".join(name.split(".")[: 2 if name.startswith("setp") else 1])
            found = int(ARITHMETIC[operation](*map(self.value, given[1:])))
        self.registers[given[0]] = found & MASK

    def run(self) -> None:
        lines = [x.strip().rstrip(";") for x in PTX[PTX.index("mov.u64") :].splitlines()]
        lines = [x for x in lines if x]
        at = 0
        while True:
            line, at = lines[at], at + 1
            if line.startswith("@"):
                condition, line = line[1:].split(" ", 1)
                if not self.registers[condition]:
                    continue
            name, _, rest = line.partition(" ")
            if name == "ret":
                return
            if name == "bra":
                at = lines.index(f"{rest}:")
            elif not name.endswith(":"):
                self.compute(name, [x.strip() for x in rest.split(",")])


def cleared(offsets: list[int], *, rows: int, width: int, times: int) -> np.ndarray:
    """Words [times, rows, width] of the second array, after 2 blocks of 3 threads."""
    count = times * rows * width
    memory = {OFFSETS + 4 * i: x for i, x in enumerate(offsets)}
    memory |= {WORDS + 4 * i: KEPT for i in range(count)}
    one = struct.pack(
        "<6Q2I", WORDS, OFFSETS, len(offsets) - 1, width, rows, times, PADDING, INVALID
    )
    for thread in range(6):
        block, lane = divmod(thread, 3)
        places = {"%ctaid.x": block, "%ctaid.y": 1, "%nctaid.x": 2, "%ntid.x": 3, "%tid.x": lane}
        Thread({"arrays": 0, **places}, bytes(len(one)) + one, memory).run()
    found = [memory[WORDS + 4 * i] for i in range(count)]
    return np.reshape(found, (times, rows, width))


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("end", [0, 5, 8, 10])
def test_rows_past_the_last_sequence_become_padding(end: int, width: int, times: int):
    found = cleared([0, 2, end], rows=10, width=width, times=times)
    assert (found[:, :end] == KEPT).all() and (found[:, end:] == PADDING).all()


@pytest.mark.parametrize("times", [1, 3])
def test_wrong_offsets_make_all_rows_invalid(times: int):
    assert (cleared([10, 10, 10], rows=10, width=2, times=times) == INVALID).all()


@pytest.mark.parametrize(
    ("offsets", "expected"), [([0, 99], KEPT), ([0, -3], PADDING), ([99, 0], INVALID)]
)
def test_offsets_outside_of_the_rows_reach_no_other_memory(offsets: list[int], expected: int):
    assert (cleared(offsets, rows=10, width=2, times=2) == expected).all()
