"""Calls on the machine code of AITER v0.1.15 or later (ATTN_DISPATCH_AITER_DIR: its folder)."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import Release
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support import aiter_emulated
from tests.support.aiter_check import Check
from tests.support.aiter_v0_1_15 import build, library
from tests.support.cdna import disassembler
from tests.support.cdna.cases import CAUSAL, SCHEDULES, TIMED, case
from tests.support.cdna.kernels import Gpu, files_by_name
from tests.support.cdna.listings import machine
from tests.support.cdna.machine import AT_ONCE, Schedule

RELEASE = Release("v0.1.15", (0, 1, 20))
GAPS: dict[str, Any] = {"b": 2, "q_lengths": (100, 144), "kv_lengths": (160, 131)}
CASES = (
    case("full"),
    case("causal", **CAUSAL),
    case("ragged", t=200, s=131, **CAUSAL),
    case("gaps", **GAPS),
    case("causal gaps", **GAPS, **CAUSAL),
)


class _Gpu(Gpu):
    """A GPU on which data that gfx942's dq_convert kernels read from LDS is there at once."""

    waits = False
    """Whether such data is late there too."""

    def run_kernel(self, path: Path, sizes: Sequence[int], arguments: bytes) -> None:
        before = self.schedule
        if "dq_convert" in path.stem and not self.waits:
            self.schedule = AT_ONCE
        super().run_kernel(path, sizes, arguments)
        self.schedule = before


@pytest.fixture
def gpu_of(
    monkeypatch: pytest.MonkeyPatch, without_rewrites: None
) -> Iterator[Callable[[str], _Gpu]]:
    """A function that makes calls of AITER run on a GPU of an architecture."""
    missing = build.missing_sources()
    if missing or isinstance(disassembler.library(), str):
        pytest.skip(f"missing: {missing or disassembler.library()}")
    emulator = aiter_emulated.emulator()
    monkeypatch.setattr(aiter_folder, "release", lambda arch: RELEASE)

    def made(arch: str) -> _Gpu:
        folder = build.sources()
        assert folder is not None
        emulator.reset()
        emulator.set_arch(arch)
        emulator.set_generation(RELEASE.generation)
        files = files_by_name(folder / "hsa" / arch)
        gpu = _Gpu(library.dispatch(arch), machine(), emulator, files=files)
        emulator.set_server(gpu.serve)
        return gpu

    yield made
    emulator.reset()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("call", CASES, ids=str)
def test_kernels_agree_with_the_reference(call: Case, arch: str, gpu_of: Callable[[str], _Gpu]):
    gpu = gpu_of(arch)
    gpu.waits = arch == "gfx950"
    check = Check.of(call, parse(arch), gpu.emulator)
    lacks_barriers = arch == "gfx950" and call.is_causal
    for gpu.schedule in (TIMED,) if lacks_barriers else SCHEDULES:
        gpu.ran = []
        errors = check.errors()
        assert len(gpu.ran) == 4 and "ck" not in gpu.ran
        assert max(errors.values()) <= 1, (gpu.schedule, errors)
        assert gpu.conflicts == [] or lacks_barriers, gpu.schedule


def test_missing_wait_of_gfx942(gpu_of: Callable[[str], _Gpu]):
    """dq_convert reads LDS, passes a barrier, and stores what it read with no s_waitcnt between."""
    gpu = gpu_of("gfx942")
    gpu.waits = True
    gpu.schedule = Schedule("late", registers=True)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"dq_convert.*v16 is used before its load"
    ):
        Check.of(case("wait"), parse("gfx942"), gpu.emulator).errors()
