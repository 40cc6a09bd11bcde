"""Compiles the shared libraries for one Python, against an old glibc."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from environments import Failed, run
from plugins import BUILD, OLDEST_JAX, REPOSITORY

_HEADERS = BUILD / "headers"
# The same as in the Makefile: only headers are needed, so requirements are left out.
_HEADER_PACKAGES = (
    "nvidia-cudnn-frontend>=1.28,<1.30",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-runtime>=13",
    "nvidia-cuda-crt>=13",
    "nvidia-cuda-cccl>=13",
    "nvidia-cuda-nvrtc>=13",
    f"jaxlib=={OLDEST_JAX}",
    "pybind11>=3.0",
)
_INCLUDES = ("include", "nvidia/cudnn/include", "nvidia/cu13/include", "jaxlib/include")


def interpreter(version: str) -> Path | None:
    """A CPython of this version from a manylinux container, from pyenv, or on PATH."""
    digits = version.replace(".", "")
    places = [
        *Path("/opt/python").glob(f"cp{digits}-cp{digits}/bin/python"),
        *Path.home().glob(f".pyenv/versions/{version}.*/bin/python"),
    ]
    if on_path := shutil.which(f"python{version}"):
        places.append(Path(on_path))
    return next((x for x in places if _runs(x)), None)


def _runs(python: Path) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def compiled(version: str) -> Path:
    """The folder of the libraries for this version of Python."""
    return BUILD / "libraries" / version / "attn_dispatch"


def compile_for(python: Path, version: str, switches: tuple[str, ...]) -> str:
    """Build the libraries of these CMake switches for this Python, into `compiled(version)`.

    All versions share a build folder, so that sources which do not include Python, most of them,
    are compiled only once.
    """
    zig = importlib.util.find_spec("ziglang")
    assert zig is not None and zig.origin is not None, (
        "zig: pip install -r release/requirements.txt"
    )
    tools = Path(sys.executable).parent
    environment = (
        os.environ
        | header_environment()
        | {
            "ATTN_RELEASE_ZIG": str(_zig()),
            "ATTN_RELEASE_MULTIARCH": str(_multiarch(python)),
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        }
    )
    objects, installed = BUILD / "objects", compiled(version).parent
    shutil.rmtree(installed, ignore_errors=True)
    configure = [
        "cmake", "--fresh", "-G", "Ninja", "-S", REPOSITORY, "-B", objects,
        f"-DCMAKE_TOOLCHAIN_FILE={Path(__file__).with_name('manylinux.cmake')}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={python}",
        f"-Dpybind11_DIR={_HEADERS / 'pybind11/share/cmake/pybind11'}",
        *(f"-D{switch}=ON" for switch in switches),
    ]  # fmt: skip
    log = BUILD / f"compile-{version}.log"
    with log.open("w") as output:
        for command in (
            configure,
            ["cmake", "--build", objects],
            ["cmake", "--install", objects, "--prefix", installed],
        ):
            done = subprocess.run(command, env=environment, stdout=output, stderr=output)
            if done.returncode != 0:
                raise Failed(f"{' '.join(map(str, command))}: see {log}")
    return ""


def _multiarch(python: Path) -> Path:
    """An include folder in which Debian's Pythons find the rest of their pyconfig.h.

    They include it by a path under /usr/include, where zig does not look.
    """
    code = "import sysconfig; print(sysconfig.get_path('include'))"
    included = Path(run(python, "-c", code).strip()).parent
    folder = BUILD / "multiarch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "x86_64-linux-gnu").symlink_to(included / "x86_64-linux-gnu")
    return folder


def _zig() -> Path:
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise Failed("there is no zig: pip install -r release/requirements.txt")
    return Path(found.origin).with_name("zig")


def header_environment() -> dict[str, str]:
    """The environment variable that names the folders of headers. Missing ones are downloaded."""
    if not _HEADERS.exists():
        _fetch_headers()
    return {"ATTN_DISPATCH_INCLUDE": os.pathsep.join(str(_HEADERS / x) for x in _INCLUDES)}


def _fetch_headers() -> None:
    unfinished = _HEADERS.with_suffix(".tmp")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", unfinished, *_HEADER_PACKAGES], check=True)
    unfinished.rename(_HEADERS)


def licenses() -> Path:
    """A folder with the licenses of the code that is compiled into the libraries."""
    folder = BUILD / "licenses"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for package in ("nvidia_cudnn_frontend", "pybind11"):
        for found in _HEADERS.glob(f"{package}-*.dist-info/licenses/*"):
            shutil.copy(found, folder / f"{package}-{found.name}")
    shutil.copy(_zig().parent / "lib" / "libcxx" / "LICENSE.TXT", folder / "libcxx.txt")
    return folder
