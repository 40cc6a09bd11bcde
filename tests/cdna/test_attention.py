"""Calls of attention on AITER's own machine code, from JAX's program to the kernels' stores.

A call is lowered for an AMD GPU. The handlers run on this CPU and call the adapter and AITER's
dispatch, whose kernels are read from the wheel and interpreted. Results are compared with float64;
NaN fills padding and, before the call, all that must be written.
"""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

from collections.abc import Callable

import pytest

from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support.aiter_check import Check
from tests.support.cdna.kernels import Gpu
from tests.support.cdna.machine import Schedule
from tests.support.emulator.native import Emulator

GpuOf = Callable[[str, Schedule], Gpu]
STRICT = Schedule("late", conflicts=True, registers=True, fill=0x7FC00BAD)
"""Data arrives as late as it may, and NaN is in registers and LDS."""
TIMED = Schedule("timed", seed=1, conflicts=True)
SCHEDULES = (STRICT, TIMED, *(Schedule("random", seed=x, quantum=100) for x in (2, 3)))


def _case(name: str, **facts: object) -> Case:
    usual = {"b": 1, "t": 144, "s": 160, "n": 2, "k": 1, "h": 128, "v": 128, "dtype": "bfloat16"}
    return Case(f"cdna/{name}", **(usual | {"scale": 128**-0.5} | facts))


_CAUSAL = {"is_causal": True, "alignment": "bottom_right"}
CASES = (
    _case("full"),
    _case("causal", **_CAUSAL),
    _case("ragged", t=200, s=131, **_CAUSAL),
    _case("fp16", dtype="float16", t=131, s=97),
)


def _errors(case: Case, gpu: Gpu, emulator: Emulator) -> dict[str, float]:
    return Check.of(case, parse("gfx942"), emulator).errors()


@pytest.mark.usefixtures("without_rewrites")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_of_gfx942_agree_with_the_reference(case: Case, gpu_of: GpuOf):
    check = None
    for schedule in SCHEDULES:
        gpu = gpu_of("gfx942", schedule)
        check = check or Check.of(case, parse("gfx942"), gpu.emulator)
        errors = check.errors()
        print(case, schedule, errors, gpu.ran, gpu.instructions)
        assert max(errors.values()) <= 1, (schedule, errors)
        assert gpu.conflicts == []
