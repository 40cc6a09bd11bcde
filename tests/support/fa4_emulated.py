"""The handlers of cuda_backend/fa4, and those that clear rows, under JAX on this CPU.

Below them is a fake driver.

The kernels are those of fa4_stand_in.py, which compute, unless ATTN_DISPATCH_TEST_FA4 names a
library that `attn-dispatch build-fa4` made: its kernels are launched, and nothing runs them.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import jax
import pybind11
import pytest

from attn_dispatch.devices import clear_rows
from attn_dispatch.fa4 import compiled, folder
from attn_dispatch.fa4.compiled import CompiledLibrary
from tests.support import fa4_stand_in
from tests.support.emulator import build
from tests.support.repository import ROOT

NAME = "_fa4_emulated"
HERE = Path(__file__).with_name("fa4_emulator")
CUDA_BACKEND = ROOT / "cuda_backend"
SOURCES = (
    *sorted((CUDA_BACKEND / "fa4").glob("*.cc")),
    *(
        CUDA_BACKEND / f"{x}.cc"
        for x in (
            "library",
            "ptx_kernel",
            "clear_rows",
            "clear_rows_handler",
            "clear_ends",
            "clear_ends_handler",
        )
    ),
    HERE / "module.cc",
)
_REAL = os.environ.get("ATTN_DISPATCH_TEST_FA4", "")

needs_computing_kernels = pytest.mark.skipif(bool(_REAL), reason="nothing runs compiled kernels")


class FakeDriver:
    """The fake driver of this process."""

    def __init__(self) -> None:
        path = build.build(
            "libattn_fake_driver", [HERE / "fake_driver.cc"],
            flags=[
                f"-I{CUDA_BACKEND}", "-Wl,-soname,libattn_fake_driver.so", "-fvisibility=default",
            ],
        )  # fmt: skip
        self._library = ctypes.CDLL(str(path))
        self._library.fake_log.restype = ctypes.c_char_p

    def lines(self) -> list[str]:
        """What was loaded, filled and launched since the last time."""
        lines = self._library.fake_log().decode(errors="replace").splitlines()
        self._library.fake_clear()
        return lines

    def fail(self, name: str, call: int = 1) -> None:
        """Let this call of the driver's function fail, counted from now."""
        self._library.fake_fail(name.encode(), call)


@dataclass(frozen=True)
class Emulated:
    """The handlers, which are registered as custom calls on the CPU."""

    module: ModuleType
    driver: FakeDriver
    library: CompiledLibrary


@cache
def emulated() -> Emulated:
    """Build and load everything. It stays in this process for good."""
    driver, handlers = FakeDriver(), module()
    library = compiled.load(handlers, Path(_REAL) if _REAL else _stand_in())
    assert library.is_usable, library.unusable_reason
    jax.devices("cpu")  # the types of states can be registered only once there is a platform
    compiled.register_handlers(handlers, "cpu")
    assert handlers.has_driver()  # XLA's CPU platform runs no handlers that initialize
    clear_rows.register_handlers(handlers, "cpu")
    return Emulated(handlers, driver, library)


def _stand_in() -> Path:
    """The library of stand-ins, built by one process at a time."""
    target = build.FOLDER / "fa4_stand_in"
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = [*HERE.glob("*"), *fa4_stand_in.BUILD_FA4.glob("*")]
        sources += [Path(fa4_stand_in.__file__)]
        newest = max(x.stat().st_mtime for x in sources if x.is_file())
        built = target / folder.LIBRARY
        if not built.exists() or built.stat().st_mtime < newest:
            fa4_stand_in.library(target)
        return built


def module() -> ModuleType:
    """The handlers as a module with `_cuda`'s functions for them."""
    path = build.build(
        NAME,
        SOURCES,
        include_dirs=[CUDA_BACKEND, fa4_stand_in.BUILD_FA4],
        defines=["ATTN_DISPATCH_EMULATED"],
        system_include_dirs=[
            jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_path("include"),
        ],
        # Before the folders of rocm_backend, which has files of the same names.
        flags=[f"-I{CUDA_BACKEND}", "-Wno-missing-field-initializers", "-Wl,--wrap=dlopen"],
        suffix=build.module_suffix(),
    )  # fmt: skip
    found = importlib.util.spec_from_file_location(NAME, path)
    assert found is not None and found.loader is not None
    loaded = importlib.util.module_from_spec(found)
    sys.modules[NAME] = loaded
    found.loader.exec_module(loaded)
    return loaded
