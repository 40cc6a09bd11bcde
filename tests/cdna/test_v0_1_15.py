"""Calls on the machine code of AITER v0.1.15 or later (ATTN_DISPATCH_AITER_DIR: its folder)."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import jax
import pytest

from attn_dispatch.aiter.rules_v0_1_15 import BEYOND_KEYS
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support.aiter_check import Check
from tests.support.cdna import generations
from tests.support.cdna.cases import CAUSAL, SCHEDULES, TIMED, case
from tests.support.cdna.kernels import Gpu
from tests.support.cdna.machine import AT_ONCE, Schedule

GAPS: dict[str, Any] = {"b": 2, "q_lengths": (100, 144), "kv_lengths": (160, 131)}
CASES = (
    case("full"),
    case("causal", **CAUSAL),
    case("ragged", t=200, s=131, **CAUSAL),
    case("gaps", **GAPS),
    case("causal gaps", **GAPS, **CAUSAL),
)


GpuOf = Callable[..., Gpu]


@pytest.fixture
def gpu_of(without_rewrites: None) -> Iterator[GpuOf]:
    """A function that makes calls of AITER run on a GPU of an architecture."""
    if missing := generations.missing("v0.1.15"):
        pytest.skip(missing)
    with ExitStack() as stack:
        yield lambda arch, *lifted: stack.enter_context(generations.gpu_of("v0.1.15", arch, lifted))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("call", CASES, ids=str)
def test_kernels_agree_with_the_reference(call: Case, arch: str, gpu_of: GpuOf):
    gpu = gpu_of(arch)
    check = Check.of(call, parse(arch), gpu.emulator)
    lacks_barriers = arch == "gfx950" and call.is_causal
    for gpu.schedule in (TIMED,) if lacks_barriers else SCHEDULES:
        gpu.ran = []
        errors = check.errors()
        assert len(gpu.ran) == 4 and "ck" not in gpu.ran
        assert max(errors.values()) <= 1, (gpu.schedule, errors)
        assert gpu.conflicts == [] or lacks_barriers, gpu.schedule


def test_missing_wait_of_gfx942(gpu_of: GpuOf):
    """dq_convert reads LDS, passes a barrier, and stores what it read with no s_waitcnt between."""
    gpu = gpu_of("gfx942")
    gpu.waits = True
    gpu.schedule = Schedule("late", registers=True)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"dq_convert.*v16 is used before its load"
    ):
        Check.of(case("wait"), parse("gfx942"), gpu.emulator).errors()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gfx950_writes_beyond_the_last_key_from_the_bottom_right(dtype: str, gpu_of: GpuOf):
    """A tile of keys moves the base of dk and dv, whose NUM_RECORDS stays that of the array.

    Without our rule; it leaves calls in which no tile ends there. With equal lengths the adapter
    asks for the other diagonal's kernel.
    """
    facts: dict[str, Any] = {"dtype": dtype, "n": 1, **CAUSAL}
    gpu = gpu_of("gfx950", BEYOND_KEYS.name)
    gpu.schedule = AT_ONCE
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"causal_br_a32.* is in no buffer"):
        Check.of(case("beyond", t=290, s=300, **facts), parse("gfx950"), gpu.emulator).errors()
    gpu = gpu_of("gfx950")
    gpu.schedule = TIMED
    for t, s, kernel in ((290, 512, "causal_br"), (200, 256, "causal_br"), (300, 300, "causal")):
        gpu.ran = []
        check = Check.of(case(f"within {t} {s}", t=t, s=s, **facts), parse("gfx950"), gpu.emulator)
        assert max(check.errors().values()) <= 1
        assert any(f"{kernel}_a32" in x for x in gpu.ran), gpu.ran
