"""Small C and C++ programs and libraries, compiled by the tests that need them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or ""

needs_compiler = pytest.mark.skipif(not CXX, reason="needs a C++ compiler: no g++ or c++ on PATH")


def compiled(output: Path, *arguments: str | Path) -> Path:
    """`output`, made of these arguments of the compiler; every warning is an error."""
    command = [CXX, "-Wall", "-Wextra", "-Werror", *map(str, arguments), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def library(output: Path, source: str, *arguments: str | Path) -> Path:
    """A shared library of this C++, whose soname is its file's name."""
    text = output.with_suffix(".cc")
    text.write_text(source)
    return compiled(
        output, text, "-shared", "-fPIC", f"-Wl,-soname,{output.name}", *arguments
    )  # fmt: skip
