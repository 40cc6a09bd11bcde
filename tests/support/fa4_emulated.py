"""The handlers of cuda_backend/fa4 under JAX on this CPU, over a fake driver."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import jax
import pybind11

from tests.support.emulator import build
from tests.support.repository import ROOT

NAME = "_fa4_emulated"
HERE = Path(__file__).with_name("fa4_emulator")
CUDA_BACKEND = ROOT / "cuda_backend"
BUILD_FA4 = ROOT / "dispatch" / "attn_dispatch_tools" / "build_fa4"
SOURCES = (
    *sorted((CUDA_BACKEND / "fa4").glob("*.cc")),
    CUDA_BACKEND / "library.cc",
    CUDA_BACKEND / "elf_file.cc",
    HERE / "module.cc",
)


def module() -> ModuleType:
    """The handlers as a module with `_cuda`'s functions for them."""
    path = build.build(
        NAME,
        SOURCES,
        include_dirs=[CUDA_BACKEND, BUILD_FA4],
        defines=["ATTN_DISPATCH_EMULATED"],
        system_include_dirs=[
            jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_path("include"),
        ],
        # Before the folders of rocm_backend, which has files of the same names.
        flags=[f"-I{CUDA_BACKEND}", "-Wno-missing-field-initializers"],
        suffix=build.module_suffix(),
    )  # fmt: skip
    found = importlib.util.spec_from_file_location(NAME, path)
    assert found is not None and found.loader is not None
    loaded = importlib.util.module_from_spec(found)
    sys.modules[NAME] = loaded
    found.loader.exec_module(loaded)
    return loaded


class FakeDriver:
    """The fake driver of this process, to which it stays for good."""

    def __init__(self) -> None:
        path = build.build(
            "libattn_fake_driver", [HERE / "fake_driver.cc"],
            flags=["-Wl,-soname,libcuda.so.1", "-fvisibility=default"],
        )  # fmt: skip
        self._library = ctypes.CDLL(str(path))
        self._library.fake_log.restype = ctypes.c_char_p

    def lines(self) -> list[str]:
        """What was loaded, filled and launched since the last time."""
        lines = self._library.fake_log().decode().splitlines()
        self._library.fake_clear()
        return lines

    def fail(self, name: str, call: int = 1) -> None:
        """Let this call of the driver's function fail, counted from now."""
        self._library.fake_fail(name.encode(), call)
