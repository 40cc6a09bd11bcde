"""PTX as the assembler of the CUDA toolkit takes it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def assemble(ptx: str, folder: Path, arch: str) -> subprocess.CompletedProcess[str]:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas, of the CUDA toolkit")
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas, f"--gpu-name={arch}", str(source), "--output-file", str(folder / "kernel")]
    return subprocess.run(command, capture_output=True, text=True)
