"""The PTX of clear_rows.cc assembles for every architecture that the installed ptxas knows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SOURCE = ROOT / "cuda_backend" / "clear_rows.cc"
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def kernel() -> str:
    found = re.search(r'kKernel\[\] = R"\((.*?)\)"', SOURCE.read_text(), re.DOTALL)
    assert found
    return found[1]


def assemble(ptx: str, folder: Path, arch: str) -> subprocess.CompletedProcess[str]:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas, of the CUDA toolkit")
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas, f"--gpu-name={arch}", str(source), "--output-file", str(folder / "kernel")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_assembles(tmp_path: Path, arch: str):
    done = assemble(kernel(), tmp_path, arch)
    if f"Value '{arch}' is not defined" in done.stderr:
        pytest.skip(f"this ptxas does not know {arch}")
    assert done.returncode == 0, done.stderr


def test_the_assembler_rejects_a_wrong_instruction(tmp_path: Path):
    done = assemble(kernel().replace("st.global.v4.u32", "st.global.v5.u32"), tmp_path, "sm_90")
    assert done.returncode != 0


def test_the_kernels_name_and_parameters_match_its_launch():
    """clear_rows looks the kernel up by name, and passes its parameters in order."""
    text = SOURCE.read_text()
    (name,) = re.findall(r'find\(&function, module, "(\w+)"\)', text)
    (arguments,) = re.findall(r"arguments\[\] = \{(.*)\}", text)
    parameters = re.search(rf"\.entry {name}\((.*?)\)", kernel(), re.DOTALL)
    assert parameters
    names = re.findall(r"\.param \.u64 (\w+)", parameters[1])
    assert [f"&{x}" for x in names] == arguments.split(", ")
