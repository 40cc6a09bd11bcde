"""Both generations of AITER on the interpreter: their dispatch, their tables and their files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from attn_dispatch.aiter import asm_rules
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import DEV18, Release
from attn_dispatch.devices.aiter_versions import version_of
from attn_dispatch_tools.build_aiter import asm_tables
from tests.support import aiter_emulated
from tests.support.aiter_dispatch import api
from tests.support.aiter_dispatch import build as dev18
from tests.support.aiter_v0_1_15 import build as v0_1_15
from tests.support.aiter_v0_1_15 import library as v0_1_15_library
from tests.support.cdna import disassembler
from tests.support.cdna.kernels import MI308, Gpu, files_by_name
from tests.support.cdna.listings import machine

GENERATIONS = ("dev18", "v0.1.15")
ARCHS = ("gfx942", "gfx950")


def missing(generation: str) -> str:
    """What is missing to run a generation's kernels, or ""."""
    disassembles = disassembler.library()
    if isinstance(disassembles, str):
        return disassembles
    if generation == DEV18.generation:
        tools = dev18.tools()
        return tools if isinstance(tools, str) else ""
    return v0_1_15.missing_sources()


def release(generation: str) -> Release:
    """The release whose kernels run; that of a checkout is the name of its folder."""
    if generation == DEV18.generation:
        return DEV18
    folder = v0_1_15.sources()
    assert folder is not None
    return Release(generation, version_of(folder.name) or (0, 1, 20))


def hsa(generation: str, arch: str) -> Path:
    """The folder of the code objects of an architecture."""
    if generation == DEV18.generation:
        return Path(dev18.asm_folder(arch))
    folder = v0_1_15.sources()
    assert folder is not None
    return folder / "hsa" / arch


def code_objects(generation: str, arch: str) -> list[Path]:
    """The files of attention's kernels, but for float8's, whose instructions are not known here."""
    paths = sorted(hsa(generation, arch).glob("fmha_v3_*/**/*.co"))
    return [x for x in paths if "_fp8" not in x.name]


def table(generation: str, arch: str) -> list[str]:
    """The kernels in AITER's own tables, and of dev18 the files: MI308's after its folder's name.

    A table of dev18 is part of a program that makes C++, and some names are put together there.
    """
    folder = hsa(generation, arch)
    if generation != DEV18.generation:
        names = {x.removesuffix(".co") for x in asm_tables.files(folder.parent, arch)}
    else:
        texts = ((folder / x / "codegen.py").read_text() for x in asm_tables.MODULES)
        names = {x for text in texts for x in re.findall(r"\b(\w+)\.co\b", text)}
        names |= {x.stem for x in folder.glob("fmha_v3_*/**/*.co")}
    has_boards = (folder / "fmha_v3_fwd" / MI308).is_dir()
    boards = {f"{MI308}/{x}" for x in names if has_boards and x.startswith("fwd_")}
    return sorted(names | boards)


@cache
def _dev18_dispatch() -> api.Library:
    found = api.Library(dev18.build()[0])
    found.set_hip_version(7)
    for arch in ARCHS:
        found.set_asm_folder(arch, dev18.asm_folder(arch))
    return found


def dispatch(generation: str, arch: str) -> api.Library:
    """AITER's dispatch on a GPU of an architecture."""
    if generation == DEV18.generation:
        _dev18_dispatch().set_gpu(arch)
        _dev18_dispatch().take_launches()
        return _dev18_dispatch()
    return v0_1_15_library.dispatch(arch)


@cache
def _files(generation: str, arch: str) -> dict[str, Path]:
    return files_by_name(hsa(generation, arch))


@contextmanager
def planned(generation: str, lifted: Collection[str] = ()) -> Iterator[None]:
    """Plan calls for a generation, without some of our rules."""
    found = release(generation)
    with (
        mock.patch.object(aiter_folder, "release", lambda _: found),
        _without(asm_rules, "ASM_RULES", lifted),
    ):
        yield


def _without(module: ModuleType, name: str, lifted: Collection[str]) -> AbstractContextManager[Any]:
    rules = tuple(x for x in getattr(module, name) if x.name not in lifted)
    return mock.patch.object(module, name, rules)


@contextmanager
def gpu_of(generation: str, arch: str, lifted: Collection[str] = ()) -> Iterator[Gpu]:
    """A GPU on which calls that are lowered here run a generation's kernels."""
    emulator = aiter_emulated.emulator()
    emulator.reset()
    emulator.set_arch(arch)
    emulator.set_generation(generation)
    gpu = Gpu(dispatch(generation, arch), machine(), emulator)
    if generation != DEV18.generation:
        gpu.files = _files(generation, arch)
    emulator.set_server(gpu.serve)
    try:
        with planned(generation, lifted):
            yield gpu
    finally:
        emulator.reset()


def file_of(generation: str, arch: str, name: str, file: str) -> Path:
    """The file of a kernel that AITER's dispatch has launched, from what was recorded of it."""
    return Path(file) if generation == DEV18.generation else _files(generation, arch)[name]
