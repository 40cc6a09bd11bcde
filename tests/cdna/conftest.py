"""Fixtures: the interpreter, and AITER's dispatch with it in the place of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import aiter_emulated
from tests.support.aiter_dispatch import api, build
from tests.support.cdna import disassembler
from tests.support.cdna.kernels import Gpu
from tests.support.cdna.machine import Machine


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine()


@pytest.fixture(scope="session")
def dispatch() -> api.Library:
    """AITER's dispatch, compiled; without its sources, its compiler or LLVM the test skips."""
    for missing in (build.tools(), disassembler.library()):
        if isinstance(missing, str):
            pytest.skip(missing)
    return api.Library(build.build()[0])


@pytest.fixture
def gpu_of(
    machine: Machine, dispatch: api.Library, without_rewrites: None
) -> Iterator[Callable[[str], Gpu]]:
    """A function that makes calls of AITER run on a GPU of an architecture."""
    emulator = aiter_emulated.emulator()

    def made(arch: str) -> Gpu:
        dispatch.set_hip_version(7)
        dispatch.set_asm_folder(arch, build.asm_folder(arch))
        dispatch.set_gpu(arch)
        emulator.reset()
        emulator.set_arch(arch)
        gpu = Gpu(dispatch, machine, emulator)
        emulator.set_server(gpu.serve)
        return gpu

    yield made
    emulator.reset()
