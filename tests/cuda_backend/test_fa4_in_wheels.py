"""ATTN_DISPATCH_FA4: a build with FlashAttention-4's compiled kernels, of stand-ins.

test_build_for_real.py builds a wheel with the real ones, on request.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attn_dispatch.fa4 import folder as fa4_folder
from attn_dispatch_tools.build_fa4.sets import SETS
from tests.support import fa4_stand_in
from tests.support.compiled import needs_compiler
from tests.support.repository import ROOT, environment

LICENCES = {f"{x}/LICENSE" for x in ("fa4-jax", "ffpa-attn", "quack-kernels")}
SCRIPT = ROOT / "cuda_backend" / "build_fa4_library.py"
HEADERS = Path(sys.prefix, "oldest-jaxlib", "jaxlib", "include")
"""The FFI headers with which the CUDA library is built in this environment."""

CMAKE = Path(sys.executable).with_name("cmake")
needs_cmake = pytest.mark.skipif(not CMAKE.exists(), reason="needs cmake in this environment")


def _run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with the user's folders in `folder` and a C compiler that links stand-ins."""
    variables = {f"XDG_{x}_HOME": str(folder / x) for x in ("CACHE", "DATA")}
    variables |= {"CC": str(fa4_stand_in.linker(folder)), "ATTN_DISPATCH_INCLUDE": str(HEADERS)}
    return subprocess.run(
        [str(x) for x in command], capture_output=True, text=True, timeout=300,
        env=environment(**variables),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder in which the kernels are compiled once for all tests."""
    return tmp_path_factory.mktemp("fa4")


@pytest.fixture
def stand_in(folder) -> fa4_stand_in.StandInPython:
    return fa4_stand_in.python(folder)


@needs_compiler
def test_the_script_makes_the_library_and_its_licences_with_the_cache_of_build_fa4(
    folder, stand_in, tmp_path
):
    """Without JAX, which the environment of a wheel's build has not."""
    script = ("import runpy, sys; sys.modules['jax'] = None; del sys.argv[0];"
              "runpy.run_path(sys.argv[0], run_name='__main__')")  # fmt: skip
    command = (sys.executable, "-c", script, SCRIPT, tmp_path, "--python", stand_in.path)
    done = _run(folder, *command)
    assert done.returncode == 0, done.stderr
    assert sorted(x.name for x in tmp_path.iterdir()) == [fa4_folder.LIBRARY, "licenses"]
    licences = tmp_path / "licenses"
    assert {str(x.relative_to(licences)) for x in licences.glob("*/*")} == LICENCES
    sets = {x for x in SETS if x.startswith("sm90_")}
    assert sets == {x for x in stand_in.taken() if "==" not in x and ">=" not in x}
    kept = folder / "CACHE" / "attn-dispatch" / "fa4" / "objects"
    assert len([*kept.iterdir()]) == len(sets)
    assert _run(folder, *command).returncode == 0
    assert stand_in.taken() == []


def test_a_failure_of_the_script_is_a_sentence(tmp_path):
    stand_in = fa4_stand_in.python(tmp_path)
    stand_in.fail("fa4-jax")
    done = _run(tmp_path, sys.executable, SCRIPT, tmp_path / "out", "--python", stand_in.path)
    assert done.returncode == 1
    assert done.stderr.startswith("FlashAttention-4's kernels: pip install fa4-jax==0.1.0 failed")
    assert not (tmp_path / "out" / fa4_folder.LIBRARY).exists()


def test_the_variable_reaches_cmake():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    builds = project["tool"]["scikit-build"]["overrides"]
    (build,) = [x for x in builds if "ATTN_DISPATCH_FA4" in x["if"]["env"]]
    assert build["cmake"]["define"] == {"ATTN_DISPATCH_FA4": "ON"}
    # It adds to what ATTN_DISPATCH_CUDA says.
    appended = {"cmake": {"define": "append"}, "build": {"requires": "append"}}
    assert build["inherit"] == appended


@needs_cmake
@needs_compiler
@pytest.mark.skipif(not HEADERS.exists(), reason="needs the headers of the CUDA library's build")
def test_the_option_of_cmake_installs_the_library_and_its_licences(folder, stand_in, tmp_path):
    build, prefix = tmp_path / "build", tmp_path / "installed"
    options = {
        "ATTN_DISPATCH_CUDA": "ON", "ATTN_DISPATCH_FA4": "ON",
        "ATTN_DISPATCH_FA4_PYTHON": stand_in.path, "Python_EXECUTABLE": sys.executable,
        "SKBUILD_METADATA_DIR": prefix / "metadata",
    }  # fmt: skip
    defines = [f"-D{x}={y}" for x, y in options.items()]
    for step in (
        (CMAKE, "-S", ROOT, "-B", build, *defines),
        (CMAKE, "--build", build, "--target", "fa4_library"),
        (CMAKE, "--install", build, "--component", "fa4", "--prefix", prefix),
    ):
        done = _run(folder, *step)
        assert done.returncode == 0, done.stdout + done.stderr
    installed = {str(x.relative_to(prefix)) for x in prefix.rglob("*") if x.is_file()}
    licences = {f"metadata/licenses/{x}" for x in LICENCES}
    assert installed == {f"attn_dispatch/{fa4_folder.LIBRARY}", *licences}


@needs_cmake
def test_without_the_cuda_library_the_option_is_refused(tmp_path):
    done = _run(tmp_path, CMAKE, "-S", ROOT, "-B", tmp_path / "build", "-DATTN_DISPATCH_FA4=ON")
    assert done.returncode != 0
    assert "set ATTN_DISPATCH_CUDA as well" in " ".join(done.stderr.split())
