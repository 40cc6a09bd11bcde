"""The PTX of clear_rows.cc is what an assembler takes, for every kind of GPU that it knows."""

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


def assembled(ptx: str, folder: Path, arch: str) -> subprocess.CompletedProcess[str]:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas, of the CUDA toolkit")
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas, f"--gpu-name={arch}", str(source), "--output-file", str(folder / "kernel")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_assembles(tmp_path: Path, arch: str):
    done = assembled(kernel(), tmp_path, arch)
    if f"Value '{arch}' is not defined" in done.stderr:
        pytest.skip(f"this ptxas does not know {arch}")
    assert done.returncode == 0, done.stderr


def test_mistakes_would_be_noticed(tmp_path: Path):
    done = assembled(kernel().replace("st.global.v4.u32", "st.global.v5.u32"), tmp_path, "sm_90")
    assert done.returncode != 0


def test_names_what_the_library_looks_up():
    """By its name, with parameters in the order in which clear_rows passes them."""
    text = SOURCE.read_text()
    (name,) = re.findall(r'find\(&function, module, "(\w+)"\)', text)
    (passed,) = re.findall(r"arguments\[\] = \{(.*)\}", text)
    parameters = re.search(rf"\.entry {name}\((.*?)\)", kernel(), re.DOTALL)
    assert parameters
    assert [f"&{x}" for x in re.findall(r"\.param \.u64 (\w+)", parameters[1])] == passed.split(
        ", "
    )
