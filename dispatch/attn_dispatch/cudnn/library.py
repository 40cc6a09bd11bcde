"""Finding cuDNN and the library that speaks to it, once per process."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from attn_dispatch.devices.device import Device

SONAME = "libcudnn.so.9"


@dataclass(frozen=True)
class CudnnLibrary:
    """cuDNN as this process uses it, or the reason why it cannot."""

    backend: ModuleType | None
    """attn_dispatch._cuda, once it has loaded cuDNN."""
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


@lru_cache
def find() -> CudnnLibrary:
    """Load `_cuda` and through it the cuDNN that JAX uses, or would use."""
    try:
        backend = importlib.import_module("attn_dispatch._cuda")
    except ImportError as error:
        return CudnnLibrary(
            None,
            unusable="attn_dispatch was installed without its CUDA library; reinstall it with "
            f"ATTN_DISPATCH_CUDA=1 in the environment ({error})",
        )
    name = _locate()
    try:
        version = backend.load_cudnn(name)
    except backend.CudnnError as error:
        return CudnnLibrary(None, path=name, unusable=str(error))
    return CudnnLibrary(backend, version, backend.cudnn_path())


def _locate() -> str:
    """Where to load cuDNN from: the order in which JAX's own plugin ends up with one."""
    if chosen := os.environ.get("ATTN_DISPATCH_CUDNN"):
        return chosen
    if _is_loaded():
        return SONAME  # the loader answers with the one that came first, as it does JAX
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and Path(folder, SONAME).exists():
            return str(Path(folder, SONAME))
    for wheel in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == SONAME and Path(str(file.locate())).exists():
                return str(file.locate())
    return SONAME


def _is_loaded() -> bool:
    try:
        return SONAME in Path("/proc/self/maps").read_text()
    except OSError:
        return False
