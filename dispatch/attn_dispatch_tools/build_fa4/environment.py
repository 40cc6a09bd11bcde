"""The environment of the kernels' sources and compiler: a virtual environment of its own.

They stay apart from the packages of this Python: they need Python 3.12, and versions that are
exactly those with which the kernels were tested.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

from attn_dispatch_tools.build_fa4.processes import run
from attn_dispatch_tools.terminal.building import BuildError

SOURCES = "fa4-jax==0.1.0"
"""FlashAttention-4's kernels without PyTorch. export_kernels.py replaces two lines of them that
only this version is known to have."""

COMPILER = "nvidia-cutlass-dsl==4.8.1"
"""CUTLASS's DSL. Without its extra cu13 it compiles for sm90 code of ABI 7, which CUDA 12 and 13
run; with it, of ABI 8, which CUDA 12 refuses. For sm100 it is of ABI 8 either way, as CUDA 12.9
writes it. Newer versions may generate other host functions."""

WIDE_SOURCES = ("ffpa-attn==0.2.4", "quack-kernels==0.6.4")
"""The kernels for head dims beyond 256, and what they are written with: ffpa-attn takes this
version alone. Their PyTorch is not installed, as export_wide_kernels.py replaces what is imported
of it, and methods of the kernels, which only this version is known to have."""

PACKAGES = (SOURCES, *WIDE_SOURCES, COMPILER)
"""What is installed, with versions."""

_INTERFACE = "apache-tvm-ffi>=0.1.6,<0.2"
"""What the sources import beside the compiler. Their other requirements, JAX and PyTorch among
them, are for calling the kernels from Python."""

_OLDEST = (3, 12)
_NEWEST = (3, 14)
"""The versions of Python that have both packages."""

_NAMES = ("python3.12", "python3.13", "python3.14", "python3")
_COMPLETE = "complete"
_INSTALL_SECONDS = 1800


def versions(*, has_narrow: bool = True, has_wide: bool = False) -> str:
    """The packages that decide what is compiled.

    Args:
      has_narrow: whether it is for head dims up to 256.
      has_wide: whether it is for wider ones.
    """
    sources = (*((SOURCES,) if has_narrow else ()), *(WIDE_SOURCES if has_wide else ()))
    return " ".join((*sources, COMPILER))


def made(cache: Path, python: str | None = None) -> Path:
    """The Python of the environment, which is made and filled if it is missing."""
    requirements = f"{versions(has_wide=True)} {_INTERFACE}"
    key = hashlib.sha256(requirements.encode()).hexdigest()[:12]
    folder = cache / f"environment-{key}"
    inside = folder / "bin" / "python"
    if (folder / _COMPLETE).exists() and inside.exists():
        return inside
    outside = python or _suitable_python()
    shutil.rmtree(folder, ignore_errors=True)
    # -I: a build of a wheel has a PYTHONPATH with packages for another Python.
    run([outside, "-I", "-m", "venv", folder], what=f"{outside} -m venv", seconds=_INSTALL_SECONDS)
    pip = [inside, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    bare = "--no-deps"
    for arguments in ([COMPILER, _INTERFACE], [bare, SOURCES], [bare, *WIDE_SOURCES]):
        run([*pip, *arguments], what=f"pip install {arguments[-1]}", seconds=_INSTALL_SECONDS)
    (folder / _COMPLETE).write_text(requirements)
    return inside


def licences(inside: Path) -> dict[str, list[Path]]:
    """The licence files of each package of the kernels' sources, which accompany compiled kernels.

    Args:
      inside: the Python of the environment that has the sources.
    """
    return {x.partition("==")[0]: _licences_of(x, inside) for x in (SOURCES, *WIDE_SOURCES)}


def _licences_of(package: str, inside: Path) -> list[Path]:
    name = package.replace("-", "_").replace("==", "-")
    pattern = f"lib/python*/site-packages/{name}.dist-info/licenses/*"
    if found := sorted(inside.parents[1].glob(pattern)):
        return found
    raise BuildError(f"there are no licences of {package} in {inside.parents[1]}; delete it")


def _suitable_python() -> str:
    """A Python for which the packages exist: this one, or the first on PATH."""
    if _OLDEST <= sys.version_info[:2] <= _NEWEST:
        return sys.executable
    for name in _NAMES:
        if (found := shutil.which(name)) and _is_suitable(found):
            return found
    raise BuildError(
        f"the kernels' compiler needs Python {_text(_OLDEST)} to {_text(_NEWEST)}, this is "
        f"{sys.version.split()[0]}, and there is none on PATH; name one with --python"
    )


def _is_suitable(python: str) -> bool:
    code = f"import sys, venv; sys.exit(not {_OLDEST} <= sys.version_info[:2] <= {_NEWEST})"
    try:
        run([python, "-c", code], what=python, seconds=60)
    except BuildError:
        return False
    return True


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
