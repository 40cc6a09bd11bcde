"""Calls on the machine code of AITER v0.1.15 or later (ATTN_DISPATCH_AITER_DIR: its folder)."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter import rules_v0_1_15
from attn_dispatch.aiter.release import Release
from attn_dispatch.devices.target import parse
from attn_dispatch.warning import AttentionKernelWarning
from attn_dispatch_tools.verify.case import Case
from tests.support import aiter_emulated
from tests.support.aiter_check import Check, gradients_of
from tests.support.aiter_v0_1_15 import build, library
from tests.support.cdna import disassembler
from tests.support.cdna.cases import CAUSAL, SCHEDULES, TIMED, TOP_LEFT, case
from tests.support.cdna.kernels import Gpu, files_by_name
from tests.support.cdna.listings import machine
from tests.support.cdna.machine import AT_ONCE, Schedule
from tests.support.cdna.repairs import RepairedMachine

RELEASE = Release("v0.1.15", (0, 1, 20))
GAPS: dict[str, Any] = {"b": 2, "q_lengths": (100, 144), "kv_lengths": (160, 131)}
LONG_GAPS: dict[str, Any] = {"b": 2, "q_lengths": (100, 290), "kv_lengths": (160, 300)}
CASES = (
    case("full"),
    case("causal", **CAUSAL),
    case("ragged", t=200, s=131, **CAUSAL),
    case("gaps", **GAPS),
    case("causal gaps", **GAPS, **CAUSAL),
    case("causal blocks", t=300, s=300, k=2, **TOP_LEFT),
    case("causal blocks with gaps", t=300, s=300, **LONG_GAPS, **CAUSAL),
)
LATE = Schedule("late", registers=True)
MISSING_BARRIERS = (
    case("causal blocks", t=600, s=600, **TOP_LEFT),
    case("192/128", h=192, v=128),
    case("causal 192/128", h=192, v=128, **CAUSAL),
    case("packed 192/128", h=192, v=128, **GAPS, **CAUSAL),
)
IN_TURN = replace(AT_ONCE, conflicts=True)


class _Gpu(Gpu):
    """A GPU on which gfx942's dq_convert may store registers before their data is there."""

    checks_every_kernel = False

    def run_kernel(self, path: Path, sizes: Sequence[int], arguments: bytes) -> None:
        before = self.schedule
        if "dq_convert" in path.stem and not self.checks_every_kernel:
            self.schedule = replace(before, registers=False)
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
    check = Check.of(call, parse(arch), gpu.emulator)
    lacks_barriers = arch == "gfx950" and call.is_causal
    for gpu.schedule in (TIMED,) if lacks_barriers else SCHEDULES:
        gpu.ran = []
        errors = check.errors()
        assert "ck" not in gpu.ran and len(gpu.ran) >= 3
        assert max(errors.values()) <= 1, (gpu.schedule, errors)
        assert gpu.conflicts == [] or lacks_barriers, gpu.schedule


@pytest.mark.parametrize("call", MISSING_BARRIERS, ids=str)
def test_repaired_kernels_of_gfx950_agree_in_every_order(call: Case, gpu_of: Callable[[str], _Gpu]):
    """One or two barriers more; without them waves in turn have wrong results."""
    gpu = gpu_of("gfx950")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionKernelWarning)
        check = Check.of(call, parse("gfx950"), gpu.emulator)
    gpu.schedule = IN_TURN
    assert max(check.errors().values()) > 2
    gpu.machine = RepairedMachine()
    for gpu.schedule in (*SCHEDULES, IN_TURN):
        gpu.conflicts = []
        assert max(check.errors().values()) <= 1, gpu.schedule
        assert gpu.conflicts == [], gpu.schedule


def test_gradient_of_query_needs_no_conversion_on_gfx942(
    gpu_of: Callable[[str], _Gpu], monkeypatch: pytest.MonkeyPatch
):
    """dq_convert stores what it read from LDS without an s_waitcnt; with one it is right."""
    gpu = gpu_of("gfx942")
    gpu.schedule = LATE
    gpu.checks_every_kernel = True
    call = case("wait")
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"dq_convert.*v16 is used before its load"
    ):
        Check.of(call, parse("gfx942"), gpu.emulator).errors()
    gpu.checks_every_kernel = False
    assert max(Check.of(call, parse("gfx942"), gpu.emulator).errors().values()) <= 1
    monkeypatch.setattr(rules_v0_1_15, "DQ_IS_STORED_EARLY", ())
    of_the_kernel = Check.of(call, parse("gfx942"), gpu.emulator)
    assert of_the_kernel.errors()["query"] > 2
    gpu.machine, gpu.checks_every_kernel = RepairedMachine(), True
    for gpu.schedule in (*SCHEDULES, LATE):
        assert max(of_the_kernel.errors().values()) <= 1, gpu.schedule


@pytest.mark.parametrize("keys, leaves", [(256, False), (600, True), (512, False)])
def test_gradients_of_gfx950_past_the_end(
    keys: int, leaves: bool, gpu_of: Callable[[str], _Gpu], monkeypatch: pytest.MonkeyPatch
):
    """With a bottom-right mask, rows of the last block's keys that are not there are written."""
    gpu = gpu_of("gfx950")
    gpu.schedule = TIMED
    call = case("past the end", t=256, s=keys, **CAUSAL)
    assert ("key" not in gradients_of(call, parse("gfx950"))) == leaves
    rules = (x for x in rules_v0_1_15.RULES if x.name != "aiter/asm_backward_past_the_end")
    monkeypatch.setattr(rules_v0_1_15, "RULES", tuple(rules))
    check = Check.of(call, parse("gfx950"), gpu.emulator)
    try:
        largest = max(check.errors().values())
    except jax.errors.JaxRuntimeError as error:
        assert re.search(r"causal_br.* is in no buffer", str(error))
        largest = math.inf
    assert (largest > 2) == leaves, largest  # the rows may be those of another array
    gpu.machine = RepairedMachine()
    for gpu.schedule in SCHEDULES:
        assert max(check.errors().values()) <= 1, gpu.schedule
