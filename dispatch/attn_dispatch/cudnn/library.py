"""Finds cuDNN and loads it with `_cuda`, once per process."""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from attn_dispatch.cudnn.planning_process import PlanningProcess
from attn_dispatch.devices import code_files, native_libraries
from attn_dispatch.devices.device import Device

SONAME = "libcudnn.so.9"
VARIABLE = "ATTN_DISPATCH_CUDNN"
"""The environment variable that names the library."""

_FILE = re.compile(rb"libcudnn\.so\.9(\.[0-9]+)*")
"""File names of cuDNN: the soname may be a link to a file with the full version."""
_PART = re.compile(r"libcudnn\w*\.so\.9(\.[0-9]+)*")
"""File names of the libraries of which cuDNN consists, which libcudnn.so.9 opens on first use."""


@dataclass(frozen=True)
class Missing:
    """What has to be installed before cuDNN can plan calls here."""

    what: str
    """The library, as a sentence."""
    install: str
    """The command that installs it, in a checkout of attn-dispatch."""


@dataclass(frozen=True)
class CudnnLibrary:
    """cuDNN as this process uses it, or the reason why it cannot."""

    backend: ModuleType | PlanningProcess | None
    """The module that has loaded cuDNN: `_cuda` or, without a driver, a `_cuda` in the planning
    process, which can plan but not run."""
    version: int = 0
    """91900 for 9.19.0."""
    path: str = ""
    unusable_reason: str = ""
    """Why cuDNN cannot be used; empty if it can."""
    missing: Missing | None = None
    """The library that must be installed before cuDNN can be used; None if it can, or if that is
    not why."""

    @property
    def is_usable(self) -> bool:
        return self.backend is not None

    @property
    def version_text(self) -> str:
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    @property
    def can_run(self) -> bool:
        """Whether there is a driver, so that plans can run."""
        return self.backend is not None and not self.backend.driver_is_stand_in()

    def device_properties(self, device: Device) -> str:
        """cuDNN's device properties as JSON; for a device that is present, cuDNN reports them."""
        if device.properties is not None:
            return device.properties
        assert self.backend is not None and device.ordinal is not None
        return _properties_of(self.backend, device.ordinal)


@lru_cache
def _properties_of(backend: ModuleType | PlanningProcess, ordinal: int) -> str:
    """cuDNN's properties of a device that is present, which planning asks for several times."""
    return backend.device_properties(ordinal)


def find() -> CudnnLibrary:
    """Load `_cuda` and through it the cuDNN that JAX uses, or would use.

    The result is cached, but not a failure to load: later, memory may be free or a library
    installed.
    """
    try:
        return _load()
    except _NotLoaded as failure:
        return failure.library


class _NotLoaded(Exception):
    def __init__(self, library: CudnnLibrary) -> None:
        super().__init__(library.unusable_reason)
        self.library = library


@lru_cache
def _load() -> CudnnLibrary:
    try:
        native = native_libraries.load(native_libraries.CUDA)
    except ModuleNotFoundError as error:
        missing = _without(error) if isinstance(error, native_libraries.NotBuilt) else None
        return CudnnLibrary(None, unusable_reason=str(error), missing=missing)
    except ImportError as error:
        raise _NotLoaded(CudnnLibrary(None, unusable_reason=str(error))) from error
    name = _locate()
    try:
        backend = native if native.has_driver() else _planning_process(native)
        file = backend.cudnn_file(name)
        if file and (problem := _problem(file)):
            unusable = f"cuDNN could not be loaded: {problem}"
            raise _NotLoaded(CudnnLibrary(None, 0, name, unusable))
        version = backend.load_cudnn(name)
        return CudnnLibrary(backend, version, backend.cudnn_path())
    except native.CudnnError as error:
        missing = Missing("cuDNN is not installed", _install_cudnn()) if name == SONAME else None
        raise _NotLoaded(CudnnLibrary(None, 0, name, str(error), missing)) from error


def _problem(file: str) -> str:
    """Why cuDNN must not be loaded from this file, or a part of it from beside it; "" if it may."""
    is_named = bool(os.environ.get(VARIABLE))
    parts = sorted(x for x in Path(file).parent.glob("libcudnn*.so.9*") if _PART.fullmatch(x.name))
    problems = (code_files.library_problem(x, is_named=is_named) for x in (file, *parts))
    return next(filter(None, problems), "")


def _without(native: native_libraries.NotBuilt) -> Missing:
    install = f"{native_libraries.CUDA.switch}=1 pip install ."
    if _locate() == SONAME:
        install = f"{_install_cudnn()} && {install}"
    return Missing(native.state, install)


def _install_cudnn() -> str:
    """The command for cuDNN alone: planning needs none of the libraries that pip adds to it."""
    return f"pip install --no-deps nvidia-cudnn-cu{native_libraries.cuda_majors()[0]}"


# A forked child loads again: it cannot use what its parent has loaded, and gets that reason.
os.register_at_fork(after_in_child=_load.cache_clear)


@lru_cache
def _planning_process(native: ModuleType) -> PlanningProcess:
    """The planning process of this process; it is kept when cuDNN has to be loaded again."""
    return PlanningProcess(native)


def _locate() -> str:
    """The path to load cuDNN from, found in the order of JAX's own plugin."""
    if chosen := os.environ.get(VARIABLE):
        return chosen
    if loaded := _loaded_already():
        return loaded
    for folder in _loader_folders():
        if os.path.isfile(path := os.path.join(folder, SONAME)):
            return path
    for major in native_libraries.cuda_majors():
        try:
            files = importlib.metadata.files(f"nvidia-cudnn-cu{major}") or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == SONAME and os.path.isfile(path := str(file.locate())):
                return path
    return SONAME


def _loader_folders() -> list[str]:
    """The folders of LD_LIBRARY_PATH as the loader reads them, absolute. An empty entry is the
    current folder."""
    entries = os.environ.get("LD_LIBRARY_PATH")
    return [os.path.abspath(entry) for entry in re.split("[:;]", entries)] if entries else []


def _loaded_already() -> str:
    """The cuDNN that is loaded into this process already, which JAX would get as well."""
    try:
        mapped = Path("/proc/self/maps").read_bytes()
    except OSError:
        return ""
    # Address, permissions, offset, device, inode, and the path, which may hold any characters.
    fields = (line.split(None, 5) for line in mapped.split(b"\n"))
    paths = [x[5].removesuffix(b" (deleted)") for x in fields if len(x) == 6]
    paths = [x for x in paths if _FILE.fullmatch(os.path.basename(x))]
    for path in paths:
        for written in (path, path.replace(rb"\012", b"\n")):
            if os.path.isfile(written):
                return os.fsdecode(written)
    # A file may have been deleted since; the loader still finds the library by its soname.
    return SONAME if paths else ""
