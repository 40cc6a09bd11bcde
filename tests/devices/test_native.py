"""Finding the compiled libraries: in the package, in a wheel beside it, or why none is usable."""

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


def unusable_reason(tmp_path: Path) -> str:
    """Why cuDNN is not usable in this copy of the package; empty if it is usable."""
    return value_in_copy(tmp_path, "library.find().unusable_reason")


def value_in_copy(tmp_path: Path, expression: str) -> str:
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
PYTHON = SUFFIX.split(".")[1]


def test_reason_without_the_library(tmp_path):
    copy_without_library(tmp_path)
    message = unusable_reason(tmp_path)
    assert message.startswith(f"attn_dispatch was installed without its CUDA library; {REMEDY} (")


@pytest.mark.parametrize("has_cudnn", [True, False])
def test_command_that_installs_what_planning_needs(tmp_path, has_cudnn: bool):
    copy_without_library(tmp_path)
    cudnn = str(tmp_path / "libcudnn.so.9") if has_cudnn else "libcudnn.so.9"
    code = f"setattr(library, '_locate', lambda: {cudnn!r}), library.find().missing.install"
    install = "ATTN_DISPATCH_CUDA=1 pip install ."
    if not has_cudnn:
        install = f"pip install --no-deps nvidia-cudnn-cu13 && {install}"
    assert value_in_copy(tmp_path, f"({code})[1]") == install


def test_reason_for_a_library_for_another_python(tmp_path):
    package = copy_without_library(tmp_path)
    other = "cpython-39-x86_64-linux-gnu"
    (package / f"_cuda.{other}.so").write_text("")
    message = unusable_reason(tmp_path)
    expected = "attn_dispatch's CUDA library was built for another Python: "
    assert message.startswith(f"{expected}expected {PYTHON}, got {other}; {REMEDY} (")


def test_reason_for_a_library_that_does_not_import(tmp_path):
    package = copy_without_library(tmp_path)
    (package / f"_cuda{SUFFIX}").write_text("not a library")
    message = unusable_reason(tmp_path)
    assert message.startswith(f"attn_dispatch's CUDA library could not be imported; {REMEDY} (")
    assert "_cuda." in message


def plugin(tmp_path: Path, name: str, version: str = attn_dispatch.__version__) -> Path:
    """A plugin wheel's package, with a link to the CUDA library of this build."""
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
def test_library_in_a_wheel_beside_the_package_is_used(tmp_path, cuda):
    """The wheel's stand-in libraries, without which it is unusable here, are found as well."""
    copy_without_library(tmp_path)
    plugin(tmp_path, f"attn_dispatch_cuda{cuda}")
    message = value_in_copy(
        tmp_path,
        "(native_libraries.load(native_libraries.CUDA).__name__, library.find().unusable_reason)",
    )
    assert message == str((f"attn_dispatch_cuda{cuda}._cuda", ""))


@pytest.mark.parametrize(
    ("jax_cuda_versions", "order"),
    [((), (13, 12)), ((12,), (12, 13)), ((13,), (13, 12)), ((12, 13), (13, 12))],
)
def test_plugin_for_the_cuda_version_of_jax_comes_first(monkeypatch, jax_cuda_versions, order):
    plugins = [f"jax_cuda{cuda}_plugin" for cuda in jax_cuda_versions]
    find_spec = lambda name: name if name in plugins else None  # noqa: E731
    monkeypatch.setattr(native_libraries, "find_spec", find_spec)
    assert native_libraries.CUDA.plugins() == tuple(f"attn_dispatch_cuda{cuda}" for cuda in order)


@needs_cudnn
def test_library_in_the_package_comes_first(tmp_path):
    copy_without_library(tmp_path)
    folder = plugin(tmp_path, "attn_dispatch_cuda13", "0.0.0")
    shutil.copy(folder / f"_cuda{SUFFIX}", tmp_path / "attn_dispatch")
    assert (
        value_in_copy(tmp_path, "native_libraries.load(native_libraries.CUDA).__name__")
        == "attn_dispatch._cuda"
    )


@needs_cudnn
def test_reason_for_a_plugin_of_another_version(tmp_path):
    """The plugin for CUDA 12 would fit, but JAX's CUDA version calls for the other one."""
    copy_without_library(tmp_path)
    plugin(tmp_path, "attn_dispatch_cuda12")
    plugin(tmp_path, "attn_dispatch_cuda13", "0.0.9")
    assert unusable_reason(tmp_path) == (
        "attn-dispatch-cuda13 does not fit this attn-dispatch: expected version "
        f"{attn_dispatch.__version__}, got 0.0.9; install both of one version, or remove "
        "attn-dispatch-cuda13"
    )


def test_reason_for_a_wheel_for_another_python(tmp_path):
    copy_without_library(tmp_path)
    folder = tmp_path / "attn_dispatch_cuda13"
    folder.mkdir()
    (folder / "__init__.py").write_text(f'__version__ = "{attn_dispatch.__version__}"\n')
    other = "cpython-39-x86_64-linux-gnu"
    (folder / f"_cuda.{other}.so").write_text("")
    expected = "attn_dispatch's CUDA library was built for another Python: "
    message = unusable_reason(tmp_path)
    assert message.startswith(f"{expected}expected {PYTHON}, got {other}; {REMEDY} (")


def test_reason_for_a_rocm_wheel_of_another_version(tmp_path):
    copy_without_library(tmp_path)
    (tmp_path / "attn_dispatch_rocm.py").write_text('__version__ = "9.9.9"\n')
    message = value_in_copy(tmp_path, "attn_dispatch.aiter.library.find('gfx942').unusable_reason")
    assert message.startswith(
        "attn-dispatch-rocm does not fit this attn-dispatch: expected version "
    )
    assert "got 9.9.9; " in message
