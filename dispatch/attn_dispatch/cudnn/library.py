"""Finding cuDNN and the library that speaks to it, once per process."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from attn_dispatch.cudnn.planning import PlanningProcess
from attn_dispatch.devices import native as native_libraries
from attn_dispatch.devices.device import Device

SONAME = "libcudnn.so.9"


@dataclass(frozen=True)
class CudnnLibrary:
    """cuDNN as this process uses it, or the reason why it cannot."""

    backend: ModuleType | PlanningProcess | None
    """What has loaded cuDNN: `_cuda`, or where there is no driver one in a process of its own,
    which can plan and not run."""
    version: int = 0
    """91900 for 9.19.0."""
    path: str = ""
    unusable: str = ""

    @property
    def is_usable(self) -> bool:
        return self.backend is not None

    @property
    def version_text(self) -> str:
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    @property
    def can_run(self) -> bool:
        """Whether there is a driver, so that plans can run and not only be made."""
        return self.backend is not None and not self.backend.driver_is_stand_in()

    def device_properties(self, device: Device) -> str:
        """cuDNN's properties of a device, as JSON; of one that is here it is asked for them."""
        if device.properties is not None:
            return device.properties
        assert self.backend is not None and device.ordinal is not None
        return self.backend.device_properties(device.ordinal)


def find() -> CudnnLibrary:
    """Load `_cuda` and through it the cuDNN that JAX uses, or would use.

    What is found is kept. A failure to load is not: memory may be free again, a library installed.
    """
    try:
        return _load()
    except _NotLoaded as failure:
        return CudnnLibrary(None, path=failure.path, unusable=str(failure))


class _NotLoaded(Exception):
    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.path = path


@lru_cache
def _load() -> CudnnLibrary:
    try:
        native = native_libraries.load(native_libraries.CUDA)
    except ModuleNotFoundError as error:
        return CudnnLibrary(None, unusable=str(error))
    except ImportError as error:
        raise _NotLoaded(str(error)) from error
    name = _locate()
    backend = native if native.has_driver() else _planning_process(native)
    try:
        version = backend.load_cudnn(name)
        return CudnnLibrary(backend, version, backend.cudnn_path())
    except backend.CudnnError as error:
        raise _NotLoaded(str(error), name) from error


@lru_cache
def _planning_process(native: ModuleType) -> PlanningProcess:
    """The one of this process, also where loading cuDNN has to be tried again."""
    return PlanningProcess(native)


def _locate() -> str:
    """Where to load cuDNN from: the order in which JAX's own plugin ends up with one."""
    if chosen := os.environ.get("ATTN_DISPATCH_CUDNN"):
        return chosen
    if loaded := _loaded_already():
        return loaded
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and Path(folder, SONAME).exists():
            return str(Path(folder, SONAME))
    for major in native_libraries.cuda_majors():
        try:
            files = importlib.metadata.files(f"nvidia-cudnn-cu{major}") or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == SONAME and Path(str(file.locate())).exists():
                return str(file.locate())
    return SONAME


def _loaded_already() -> str:
    """The cuDNN that something else loaded into this process, which JAX would be given as well."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    paths = [line.split(maxsplit=5)[-1] for line in mapped.splitlines() if SONAME in line]
    # Of a file that is deleted since, the loader still knows the name.
    return next((path for path in paths if Path(path).exists()), SONAME if paths else "")
