"""Print the include directories that the CUDA backend needs, one per line.

usage: find_headers.py [--fetch FOLDER]

They are looked for in the folders of $ATTN_DISPATCH_INCLUDE, then in this interpreter's packages,
so that a machine that has cuDNN for JAX needs no second copy, then in $CUDA_HOME and in system
folders.

With --fetch, pip installs the wheels of headers that are not among the packages into FOLDER,
without what these wheels require: that would be cuBLAS, CUTLASS's DSL and SciPy, over a gigabyte
of which nothing is used. Only their headers stay there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Header:
    """A file that the C++ includes, and the wheels that have it."""

    file: str
    requirement: str
    """The wheel to fetch, as pip is asked for it."""
    others: tuple[str, ...] = ()
    """Other wheels that may contain it."""
    enough: tuple[int, ...] = ()
    """Fetching is not necessary if the environment that is installed into, which pip hides from
    builds, has this version of the wheel or a newer one; () if that is not enough."""

    @property
    def wheels(self) -> tuple[str, ...]:
        """The names of all wheels that may contain it."""
        return (re.split(r"[<>=!~]", self.requirement)[0], *self.others)


WANTED = (
    # 1.29 and later require nvidia-cutlass-dsl.
    Header("cudnn_frontend.h", "nvidia-cudnn-frontend>=1.28,<1.30"),
    # Half a gigabyte, which whoever plans calls without a GPU has installed already.
    Header("cudnn.h", "nvidia-cudnn-cu13", ("nvidia-cudnn-cu12",), enough=(9, 28)),
    Header("cuda.h", "nvidia-cuda-runtime>=13", ("nvidia-cuda-runtime-cu12",)),
    Header("cuda_runtime_api.h", "nvidia-cuda-runtime>=13", ("nvidia-cuda-runtime-cu12",)),
    Header("crt/host_defines.h", "nvidia-cuda-crt>=13",
           ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")),
    Header("nv/target", "nvidia-cuda-cccl>=13", ("nvidia-cuda-cccl-cu12",)),
    Header("nvrtc.h", "nvidia-cuda-nvrtc>=13", ("nvidia-cuda-nvrtc-cu12",)),
    # The oldest supported FFI, so that one library runs with every newer jaxlib.
    Header("xla/ffi/api/ffi.h", "jaxlib==0.10.2"),
)  # fmt: skip

_CUDA = os.environ.get("CUDA_HOME", "/usr/local/cuda")
SYSTEM = (f"{_CUDA}/include", f"{_CUDA}/include/cccl", "/usr/include")


def in_packages(header: Header, places: list[str]) -> str | None:
    """The folder in which `#include <header>` finds the header, among the packages of `places`."""
    for wheel in header.wheels:
        for found in importlib.metadata.distributions(name=wheel, path=places):
            for file in found.files or []:
                if f"/{file}".endswith(f"/{header.file}"):
                    path = Path(str(file.locate())).resolve()
                    if path.exists():
                        return str(path.parents[header.file.count("/")])
    return None


def include_dir(header: Header, system: Iterable[str]) -> str | None:
    """The folder in which `#include <header>` finds the header, or None."""
    for chosen in os.environ.get("ATTN_DISPATCH_INCLUDE", "").split(os.pathsep):
        if chosen and Path(chosen, header.file).exists():
            return chosen
    if found := in_packages(header, sys.path):
        return found
    return next((x for x in system if Path(x, header.file).exists()), None)


def in_environment(header: Header) -> str | None:
    """The folder of a header in the environment that is installed into, if that is enough."""
    place = sysconfig.get_path("purelib")
    for found in importlib.metadata.distributions(name=header.wheels[0], path=[place]):
        if header.enough and _numbers(found.version) >= header.enough:
            return in_packages(header, [place])
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version))


def fetched(headers: Iterable[Header], folder: Path) -> str:
    """The folder under `folder` with the wheels of these headers, which pip installs there."""
    requirements = list(dict.fromkeys(x.requirement for x in headers))
    complete = folder / hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:16]
    if complete.exists():
        return str(complete)
    print("fetching headers:", *requirements, file=sys.stderr, flush=True)
    unfinished = complete.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--target", unfinished, *requirements], stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"pip could not fetch the headers: {' '.join(requirements)}")
    for file in unfinished.rglob("*"):
        if file.is_file() and not {"include", "RECORD", "METADATA"} & set(file.parts):
            file.unlink()  # the libraries take a gigabyte
    unfinished.rename(complete)
    return str(complete)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--fetch", type=Path, metavar="FOLDER", help="fetch missing headers into this folder"
    )
    folder = parser.parse_args().fetch
    # A toolkit of the system may be of another version than the wheels.
    system = SYSTEM if folder is None else ()
    found = {header: include_dir(header, system) for header in WANTED}

    def missing() -> list[Header]:
        return [header for header, place in found.items() if place is None]

    if folder is not None:
        found |= {header: in_environment(header) for header in missing()}
        if fetch := missing():
            places = [fetched(fetch, folder)]
            found |= {header: in_packages(header, places) for header in fetch}
    if missing():
        wheels = [f"{x.file} (pip install --no-deps {x.wheels[0]})" for x in missing()]
        sys.exit(f"headers not found: {', '.join(wheels)}")
    print("\n".join(dict.fromkeys(str(x) for x in found.values())))


if __name__ == "__main__":
    main()
