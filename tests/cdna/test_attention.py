"""Calls of attention on AITER's own machine code, from JAX's program to the kernels' stores.

A call is lowered for an AMD GPU. The handlers run on this CPU and call the adapter and AITER's
dispatch, whose kernels are read from the wheel and interpreted. Results are compared with float64;
NaN fills padding and, before the call, all that must be written. Kernels may touch XLA's buffers
alone.
"""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import re
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from attn_dispatch.devices.target import parse
from tests.support.aiter_check import Check
from tests.support.cdna.cases import (
    CASES,
    SCHEDULES,
    STRICT,
    TIMED,
    UNSAFE,
    KernelCase,
    case,
    drawn,
)  # fmt: skip
from tests.support.cdna.generations import planned
from tests.support.cdna.kernels import Gpu
from tests.support.cdna.machine import Schedule
from tests.support.cdna.repairs import RepairedMachine
from tests.support.extent import number_of_draws

GpuOf = Callable[[str], Gpu]


@pytest.mark.parametrize("kernel_case", CASES, ids=str)
def test_kernels_agree_with_the_reference(kernel_case: KernelCase, gpu_of: GpuOf):
    """In every order of events that barriers and waits allow."""
    gpu = gpu_of(kernel_case.arch)
    check = Check.of(kernel_case.case, parse(kernel_case.arch), gpu.emulator)
    for gpu.schedule in SCHEDULES:
        gpu.ran = []
        errors = check.errors()
        assert gpu.ran == list(kernel_case.kernels)
        assert max(errors.values()) <= kernel_case.allowed, (gpu.schedule, errors)
        assert gpu.conflicts == [], gpu.schedule


def test_drawn_calls_agree_with_the_reference(gpu_of: GpuOf):
    for seed in range(number_of_draws(6, 2000)):
        arch, call, schedule = drawn(seed)
        gpu = gpu_of(arch)
        gpu.schedule = schedule
        errors = Check.of(call, parse(arch), gpu.emulator).errors()
        allowed = KernelCase(arch, call, ()).allowed
        assert max(errors.values()) <= allowed, (seed, arch, call.to_json(), errors)
        assert gpu.conflicts == [], (seed, arch, call.to_json())
        assert set(gpu.ran) - {"ck"}, (seed, arch, call.to_json())


@pytest.mark.parametrize("kernel_case, wrong", UNSAFE, ids=[str(x) for x, _ in UNSAFE])
def test_missing_barriers_of_gfx950(kernel_case: KernelCase, wrong: Schedule | None, gpu_of: GpuOf):
    """LDS is overwritten with no barrier after another wave's reads: legal orders may be wrong.

    In times like hardware's, thousands of cycles lie between, and results are right. With one
    barrier more they are right in every order.
    """
    gpu = gpu_of(kernel_case.arch)
    check = Check.of(kernel_case.case, parse(kernel_case.arch), gpu.emulator)
    gpu.schedule = STRICT
    check.errors()
    assert gpu.ran == list(kernel_case.kernels)
    assert gpu.conflicts != []
    for gpu.schedule in (replace(TIMED, seed=x) for x in range(1, 4)):
        gpu.conflicts = []
        assert max(check.errors().values()) <= 1
        cycles = (re.search(r"(\d+) cycles apart", x) for x in gpu.conflicts)
        assert min(int(x[1]) for x in cycles if x) > 2000
    if wrong is not None:
        gpu.schedule = wrong
        assert max(check.errors().values()) > 2
    gpu.machine = RepairedMachine()
    for gpu.schedule in SCHEDULES if wrong is None else (*SCHEDULES, wrong):
        gpu.conflicts = []
        assert max(check.errors().values()) <= 1, gpu.schedule
        assert gpu.conflicts == [], gpu.schedule


WINDOWS = {
    "whole": (144, 90, 30, True),
    "ragged": (150, 90, 30, False),
    "four tiles": (64, 90, 30, True),
    "three tiles": (48, 90, 30, False),
    "four tiles for the second 192 keys": (160, 200, 80, True),
    "three tiles for the second 192 keys": (160, 200, 79, False),
    "none for the second 192 keys": (160, 200, 20, False),
}
"""Queries, keys, the right side of the window, and whether the kernel reads nothing beyond."""


@pytest.mark.parametrize("queries, keys, right, is_safe", WINDOWS.values(), ids=WINDOWS)
def test_windows_backward_read_lse_beyond_the_last_row(
    queries: int, keys: int, right: int, is_safe: bool, gpu_of: GpuOf
):
    """Where a tile of 16 queries ends beyond it, in any head but the first of all: the last one, or
    one of the four that each tile of 192 keys begins with.

    Our rule keeps such calls from ASM.
    """
    call, gpu = case("window", k=2, t=queries, s=keys, window=(40, right)), gpu_of("gfx942")
    assert max(Check.of(call, parse("gfx942"), gpu.emulator).errors().values()) <= 1
    assert gpu.ran == ["ck", "bwd_hd128_bf16_swa_a32_rtne_psskddv" if is_safe else "ck"]
    with planned("dev18", ["aiter/asm_backward_window_rows"]):
        check = Check.of(call, parse("gfx942"), gpu.emulator)
    if is_safe:
        assert max(check.errors().values()) <= 1
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"swa_a32.* is in no buffer"):
            check.errors()


class _Shortened(Gpu):
    """A GPU with one buffer four bytes shorter than it is."""

    number: int

    def buffers(self) -> list[tuple[int, int]]:
        start, size = super().buffers()[self.number]
        others = [x for n, x in enumerate(super().buffers()) if n != self.number]
        return [*others, (start, size - 4)]


@pytest.mark.parametrize("number", range(5))
def test_kernel_that_leaves_a_buffer_is_noticed(number: int, gpu_of: GpuOf):
    """Every array of a forward call, too short by four bytes."""
    gpu = gpu_of("gfx942")
    shortened = _Shortened(gpu.dispatch, gpu.machine, gpu.emulator)
    shortened.number = number
    gpu.emulator.set_server(shortened.serve)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is in no buffer"):
        Check.of(case("shortened"), parse("gfx942"), gpu.emulator).errors()
