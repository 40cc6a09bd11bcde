"""The PTX of clear_rows.cc assembles for every architecture that the installed ptxas knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attn_dispatch.devices import clear_rows
from tests.support.ptx import ARCHS, assemble
from tests.support.repository import ROOT

SOURCE = ROOT / "cuda_backend" / "clear_rows.cc"


def kernel() -> str:
    found = re.search(r'kKernel\[\] = R"\((.*?)\)"', SOURCE.read_text(), re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_assembles(tmp_path: Path, arch: str):
    done = assemble(kernel(), tmp_path, arch)
    if f"Value '{arch}' is not defined" in done.stderr:
        pytest.skip(f"this ptxas does not know {arch}")
    assert done.returncode == 0, done.stderr


def test_the_assembler_rejects_a_wrong_instruction(tmp_path: Path):
    done = assemble(kernel().replace("st.global.v4.u32", "st.global.v5.u32"), tmp_path, "sm_90")
    assert done.returncode != 0


def test_the_kernels_name_and_parameter_match_its_launch():
    """clear_rows looks the kernel up by name, and passes kMostArrays arrays of 32 bytes."""
    text = SOURCE.read_text()
    (name,) = re.findall(r'kernel\(kKernel, "(\w+)"\)', text)
    (size,) = re.findall(rf"\.entry {name}\(\.param \.align 8 \.b8 arrays\[(\d+)\]\)", kernel())
    header = SOURCE.with_suffix(".h").read_text()
    (most,) = re.findall(r"kMostArrays = (\d+);", header)
    assert "sizeof(FlaggedRows) == 32" in text and int(size) == 32 * int(most)
    assert int(most) == clear_rows.MOST_ARRAYS
    assert re.findall(r"arguments\[\] = \{(.*)\}", text) == ["given.data()"]


def test_the_kernels_rows_of_a_block_match_its_launch():
    (rows,) = re.findall(r"kBlockRows = (\d+);", SOURCE.read_text())
    ptx = kernel()
    assert f"mul.wide.u32 %row, %block, {rows};" in ptx
    assert f"and.b32 %lane, %thread, {int(rows) - 1};" in ptx
    assert f"add.u64 %end, %row, {rows};" in ptx
