"""Finding cuDNN: which of several is taken, what is said of a wrong one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_dispatch import cli
from attn_dispatch.cudnn import library as cudnn_library
from backend import needs_cudnn, needs_no_driver
from compiled import library, needs_compiler

SONAME = "libcudnn.so.9"
VERSION = 'extern "C" unsigned long cudnnGetVersion() {{ return {}; }}'


@pytest.fixture
def forget() -> Iterator[None]:
    """cuDNN is looked for anew in the test, and again after it."""
    cudnn_library._load.cache_clear()
    cudnn_library._planning_process.cache_clear()
    yield
    cudnn_library._load.cache_clear()
    cudnn_library._planning_process.cache_clear()


def folder(path: Path, version: int) -> Path:
    """With something in it that says it is this cuDNN."""
    path.mkdir()
    library(path / SONAME, VERSION.format(version))
    return path


@needs_no_driver
@needs_cudnn
def test_a_missing_library_is_looked_for_again(forget, monkeypatch, tmp_path):
    path = tmp_path / SONAME
    real = cudnn_library._locate()
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(path))
    for _ in range(2):
        missing = cudnn_library.find()
        assert not missing.is_usable and missing.path == str(path)
        assert missing.unusable.startswith(f"cuDNN could not be loaded: {path}: cannot open")
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", real)  # it has been installed
    found = cudnn_library.find()
    assert found.is_usable and found.path == real
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(path))
    assert cudnn_library.find() is found  # what is found is kept


@needs_no_driver
@needs_cudnn
@needs_compiler
@pytest.mark.parametrize("version", [90100, 91199, 100000])
def test_a_version_out_of_range(forget, monkeypatch, tmp_path, version):
    """Nor is it in the way of another of that name."""
    real = cudnn_library._locate()
    wrong = folder(tmp_path / "wrong", version) / SONAME
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(wrong))
    assert cudnn_library.find().unusable == (
        f"cuDNN {version} at {wrong} is out of range: expected at least 91200 and below 100000"
    )
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", real)
    assert cudnn_library.find().path == real


@needs_no_driver
@needs_cudnn
@needs_compiler
def test_the_order_in_which_it_is_looked_for(forget, monkeypatch, tmp_path, capsys):
    """The one named; else the first in LD_LIBRARY_PATH; else that of the wheel."""
    wheel = cudnn_library._locate()
    first, second = folder(tmp_path / "a", 92001), folder(tmp_path / "b", 92102)

    def found() -> str:
        cudnn_library._load.cache_clear()
        cudnn_library._planning_process.cache_clear()
        library = cudnn_library.find()
        cli.main(["info"])
        lines = capsys.readouterr().out.splitlines()
        (number,) = (i for i, x in enumerate(lines) if x.startswith("  cuDNN"))
        assert lines[number].startswith(f"  cuDNN {library.version_text}, ")
        assert f"[{library.path}]" in "".join(x.strip() for x in lines[number : number + 4])
        return library.path

    monkeypatch.delenv("ATTN_DISPATCH_CUDNN", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{first}:{second}")
    assert found() == str(first / SONAME)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{second}:{first}")
    assert found() == str(second / SONAME)
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(first / SONAME))
    assert found() == str(first / SONAME)
    monkeypatch.delenv("ATTN_DISPATCH_CUDNN")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert found() == wheel


@needs_compiler
def test_one_that_is_loaded_already_comes_before_the_path(tmp_path):
    """In a process of its own: what is loaded stays."""
    first, second = folder(tmp_path / "a", 92001), folder(tmp_path / "b", 92102)
    code = f"""
import ctypes
from attn_dispatch.cudnn import library
ctypes.CDLL({str(second / SONAME)!r})
print(library._locate())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(first), "ATTN_DISPATCH_CUDNN": ""},
    )  # fmt: skip
    assert done.stdout == f"{second / SONAME}\n", done.stderr
