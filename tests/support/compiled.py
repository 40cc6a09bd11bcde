"""Compilation of the small C and C++ programs and libraries that tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or ""

needs_compiler = pytest.mark.skipif(not CXX, reason="needs a C++ compiler: no g++ or c++ on PATH")


def compiled(output: Path, *arguments: str | Path) -> Path:
    """Compile `output` with these arguments; every warning is an error."""
    command = [CXX, "-Wall", "-Wextra", "-Werror", *map(str, arguments), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def library(output: Path, source: str, *arguments: str | Path) -> Path:
    """Compile C++ to a shared library whose soname is the name of its file."""
    text = output.with_suffix(".cc")
    text.write_text(source)
    return compiled(
        output, text, "-shared", "-fPIC", f"-Wl,-soname,{output.name}", *arguments
    )  # fmt: skip
