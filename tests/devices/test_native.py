"""Finding our own libraries: in the package or in a wheel beside it, or why none will do."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attn_dispatch
from attn_dispatch.devices import native_libraries
from tests.support.backend import needs_cudnn


def copy_without_library(tmp_path: Path) -> Path:
    package = tmp_path / "attn_dispatch"
    shutil.copytree(
        Path(attn_dispatch.__file__).parent, package, ignore=shutil.ignore_patterns("*.so")
    )
    return package


def reason(tmp_path: Path) -> str:
    """Why cuDNN is not usable, as this copy of the package says it; empty if it is."""
    return said_by(tmp_path, "library.find().unusable_reason")


def said_by(tmp_path: Path, expression: str) -> str:
    code = f"""
import sys
sys.meta_path = [x for x in sys.meta_path if "editable" not in type(x).__module__]
import attn_dispatch
from attn_dispatch.cudnn import library
assert attn_dispatch.__file__.startswith(sys.argv[1]), attn_dispatch.__file__
from attn_dispatch.devices import native_libraries
print({expression})
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REMEDY = (
    "reinstall it with ATTN_DISPATCH_CUDA=1 in the environment, or install attn-dispatch-cuda13 "
    f"{attn_dispatch.__version__} beside it"
)
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
THIS = SUFFIX.split(".")[1]


def test_without_the_library(tmp_path):
    copy_without_library(tmp_path)
    said = reason(tmp_path)
    assert said.startswith(f"attn_dispatch was installed without its CUDA library; {REMEDY} (")


def test_a_library_for_another_python(tmp_path):
    package = copy_without_library(tmp_path)
    other = "cpython-39-x86_64-linux-gnu"
    (package / f"_cuda.{other}.so").write_text("")
    said = reason(tmp_path)
    expected = "attn_dispatch's CUDA library was built for another Python: "
    assert said.startswith(f"{expected}expected {THIS}, got {other}; {REMEDY} (")


def test_a_library_that_does_not_import(tmp_path):
    package = copy_without_library(tmp_path)
    (package / f"_cuda{SUFFIX}").write_text("not a library")
    said = reason(tmp_path)
    assert said.startswith(f"attn_dispatch's CUDA library could not be imported; {REMEDY} (")
    assert "_cuda." in said


def plugin(tmp_path: Path, name: str, version: str = attn_dispatch.__version__) -> Path:
    """A wheel's package with the CUDA library that is built here."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(f'__version__ = "{version}"\n')
    real = Path(str(importlib.import_module("attn_dispatch._cuda").__file__))
    (folder / real.name).symlink_to(real)
    for stand_in in real.parent.glob("libattn_dispatch_no_*.so"):
        (folder / stand_in.name).symlink_to(stand_in)
    return folder


@needs_cudnn
@pytest.mark.parametrize("cuda", [12, 13])
def test_a_library_beside_the_package(tmp_path, cuda):
    """And its stand-ins, without which it would not be usable here."""
    copy_without_library(tmp_path)
    plugin(tmp_path, f"attn_dispatch_cuda{cuda}")
    said = said_by(
        tmp_path,
        "(native_libraries.load(native_libraries.CUDA).__name__, library.find().unusable_reason)",
    )
    assert said == str((f"attn_dispatch_cuda{cuda}._cuda", ""))


@pytest.mark.parametrize(
    ("jax_is_for", "order"),
    [((), (13, 12)), ((12,), (12, 13)), ((13,), (13, 12)), ((12, 13), (13, 12))],
)
def test_of_two_the_one_for_the_cuda_of_jax(monkeypatch, jax_is_for, order):
    here = [f"jax_cuda{cuda}_plugin" for cuda in jax_is_for]
    monkeypatch.setattr(native_libraries, "find_spec", lambda name: name if name in here else None)
    assert native_libraries.CUDA.plugins() == tuple(f"attn_dispatch_cuda{cuda}" for cuda in order)


@needs_cudnn
def test_the_library_in_the_package_comes_first(tmp_path):
    copy_without_library(tmp_path)
    folder = plugin(tmp_path, "attn_dispatch_cuda13", "0.0.0")
    shutil.copy(folder / f"_cuda{SUFFIX}", tmp_path / "attn_dispatch")
    assert (
        said_by(tmp_path, "native_libraries.load(native_libraries.CUDA).__name__")
        == "attn_dispatch._cuda"
    )


@needs_cudnn
def test_a_library_of_another_version(tmp_path):
    """Also where the other of the two would fit: it is not the one that JAX's CUDA asks for."""
    copy_without_library(tmp_path)
    plugin(tmp_path, "attn_dispatch_cuda12")
    plugin(tmp_path, "attn_dispatch_cuda13", "0.0.9")
    assert reason(tmp_path) == (
        "attn-dispatch-cuda13 does not fit this attn-dispatch: expected version "
        f"{attn_dispatch.__version__}, got 0.0.9; install both of one version, or remove "
        "attn-dispatch-cuda13"
    )


def test_a_wheel_for_another_python(tmp_path):
    copy_without_library(tmp_path)
    folder = tmp_path / "attn_dispatch_cuda13"
    folder.mkdir()
    (folder / "__init__.py").write_text(f'__version__ = "{attn_dispatch.__version__}"\n')
    other = "cpython-39-x86_64-linux-gnu"
    (folder / f"_cuda.{other}.so").write_text("")
    expected = "attn_dispatch's CUDA library was built for another Python: "
    assert reason(tmp_path).startswith(f"{expected}expected {THIS}, got {other}; {REMEDY} (")


def test_a_rocm_wheel_of_another_version(tmp_path):
    copy_without_library(tmp_path)
    (tmp_path / "attn_dispatch_rocm.py").write_text('__version__ = "9.9.9"\n')
    said = said_by(tmp_path, "attn_dispatch.aiter.library.find('gfx942').unusable_reason")
    assert said.startswith("attn-dispatch-rocm does not fit this attn-dispatch: expected version ")
    assert "got 9.9.9; " in said
