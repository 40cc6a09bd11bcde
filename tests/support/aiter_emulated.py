"""The handlers of rocm_backend under JAX on this CPU, with the emulator in AITER's place."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import jax
import pybind11

from attn_dispatch import aiter
from tests.support.emulator import build
from tests.support.emulator.native import Emulator
from tests.support.repository import ROOT

NAME = "_rocm_emulated"
ROCM_BACKEND = ROOT / "rocm_backend"
HANDLERS = (
    "module", "handlers", "call_site", "call_structs", "call_structs_split_kv", "kernel_limits",
    "library",
)  # fmt: skip
PREPARE = build.HERE / "handlers" / "prepare.cc"
"""An entry for tests to the handlers' steps, without XLA."""


def library() -> Path:
    """The handlers and the emulator in one library, compiled against the emulator's HIP."""
    return build_module(ROCM_BACKEND, NAME)


def build_module(folder: Path, name: str) -> Path:
    """Build the handlers of a folder as a Python module of the given name."""
    return build.build(
        name,
        [*(folder / f"{handler}.cc" for handler in HANDLERS), *build.SOURCES, PREPARE],
        include_dirs=[folder],
        defines=[
            "ATTN_DISPATCH_EMULATED",
            f"ATTN_DISPATCH_MODULE={NAME}",
            "ATTN_DISPATCH_NOTE_BUFFER=attn_emulator_note_buffer",
        ],
        system_include_dirs=[
            jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_path("include"),
        ],
        flags=["-include", "emulator_buffers.h"],
        suffix=build.module_suffix(),
    )  # fmt: skip


def load_module(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(NAME, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[NAME] = module
    found.loader.exec_module(module)
    return module


_loaded: list[Emulator] = []


def emulator(path: Path | None = None) -> Emulator:
    """The emulator. The first call registers its custom calls for XLA's CPU platform."""
    if not _loaded:
        path = path or library()
        jax.devices("cpu")  # handlers are registered after the platform is up
        module = load_module(path)
        emulated = Emulator(path)
        for offers_newer in (False, True):
            emulated.offer_newer(offers_newer)
            for gfx in ("gfx942", "gfx950"):
                module.load_aiter(path, gfx)
        emulated.offer_newer(False)
        aiter.register_handlers(module, "cpu")
        _loaded.append(emulated)
    return _loaded[0]


@contextmanager
def arch(name: str) -> Iterator[Emulator]:
    """The emulator as a GPU of this architecture."""
    emulator().reset()  # an earlier test may have used it
    emulator().set_arch(name)
    try:
        yield emulator()
    finally:
        emulator().reset()
