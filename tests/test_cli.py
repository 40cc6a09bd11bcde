"""The `attn-dispatch` command."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import attn_dispatch
from attn_dispatch import cli
from attn_dispatch.aiter.folder import AiterBuild
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.library import CudnnLibrary
from backend import needs_cudnn


@pytest.fixture
def info(capsys):
    def run() -> list[str]:
        cli.main(["info"])
        return capsys.readouterr().out.splitlines()

    return run


def test_devices_versions_and_implementations(info):
    lines = info()
    assert lines[0] == (
        f"attn_dispatch {attn_dispatch.__version__}, jax {jax.__version__}, "
        f"jaxlib {importlib.metadata.version('jaxlib')}"
    )
    device = jax.devices()[0]
    assert f"  0: {device.device_kind} (cpu)" in lines[lines.index("devices") :]
    states = lines[lines.index("implementations") :]
    cudnn = next(line for line in states if line.startswith("  cudnn on CPU (cpu): "))
    assert "not usable: cuDNN runs on NVIDIA GPUs, and this is CPU (cpu)" in cudnn
    assert "  xla on CPU (cpu): usable" in states
    assert (
        "  aiter on CPU (cpu): not usable: AITER runs on AMD GPUs, and this is CPU (cpu)" in states
    )


@needs_cudnn
def test_cudnn_version_and_path(info):
    library = cudnn_library.find()
    (line,) = (line for line in info() if line.startswith("  cuDNN"))
    assert re.match(r"  cuDNN 9\.\d+\.\d+, ", line) and library.version_text in line
    assert line.endswith(f"[{library.path}]") and Path(library.path).exists()


def test_without_cudnn_the_reason_is_told(info, monkeypatch):
    lost = CudnnLibrary(None, path="/lost/libcudnn.so.9", unusable="cuDNN could not be loaded")
    monkeypatch.setattr(cudnn_library, "find", lambda: lost)
    assert "  cuDNN: cuDNN could not be loaded [/lost/libcudnn.so.9]" in info()


def test_built_aiter_is_listed(info, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_DISPATCH_AITER", str(tmp_path))
    assert f"  AITER: not built here [{tmp_path}]" in info()
    (tmp_path / "gfx942").mkdir()
    build = AiterBuild("dev18", "gfx942", "0.1.7", "", "", "hipcc 7", False, 3, 5, "2026-11-21")
    build.write(tmp_path / "gfx942")
    assert f"  AITER 0.1.7 for gfx942 [{tmp_path / 'gfx942'}]" in info()


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == attn_dispatch.__version__


@pytest.mark.parametrize("arguments", [[], ["inform"]])
def test_wrong_command(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: attn-dispatch" in capsys.readouterr().err


def test_the_command_is_installed_under_its_name():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, name = project["project"]["scripts"]["attn-dispatch"].split(":")
    assert (module, getattr(cli, name)) == (cli.__name__, cli.main)


def test_python_m_is_the_command():
    command = [sys.executable, "-m", "attn_dispatch"]
    done = subprocess.run([*command, "info"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"attn_dispatch {attn_dispatch.__version__}, jax ")
    assert "implementations\n" in done.stdout
    none = subprocess.run(command, capture_output=True, text=True, check=False)
    assert none.returncode == 2 and none.stderr.startswith("usage: attn-dispatch")
    runpy.run_module("attn_dispatch.__main__")  # imported by another name it does nothing


def test_no_message_names_the_project_as_a_package_of_an_index():
    """It is on none: its extras are installed from a checkout, and requirements by their names."""
    package = Path(attn_dispatch.__file__).parent
    files = [*package.rglob("*.py"), *package.parents[1].glob("README.md")]
    assert len(files) > 50
    for file in files:
        found = re.findall(r"install\s+['\"]?attn[-_]dispatch.*", file.read_text())
        assert not found, f"{file}: {found}"
