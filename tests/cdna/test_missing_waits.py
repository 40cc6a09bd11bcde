"""Kernels of AITER's without one of their waits or barriers, which must be noticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import pytest

from attn_dispatch.devices.target import parse
from tests.support.aiter_check import Check
from tests.support.cdna.cases import BACKWARDS, CASES, STRICT, KernelCase
from tests.support.cdna.decoder import Instruction
from tests.support.cdna.kernels import Gpu
from tests.support.extent import in_soak

pytestmark = in_soak
FORWARD_AND_BACKWARD = CASES[0]


@contextmanager
def _replaced(instruction: Instruction, op: int) -> Iterator[None]:
    before, instruction.op = instruction.op, op
    try:
        yield
    finally:
        instruction.op = before


def _errors(gpu: Gpu, check: Check) -> list[float]:
    """The errors of results under three schedules; infinite if the call fails or has a conflict."""
    found: list[float] = []
    for gpu.schedule in (STRICT, BACKWARDS, replace(STRICT, lds_queue=False)):
        gpu.conflicts = []
        try:
            errors = check.errors().values()
        except (jax.errors.JaxRuntimeError, RuntimeWarning):  # the second: NaN is converted
            errors = (math.inf,)
        found += (math.inf,) if gpu.conflicts else errors
    return found


def _are_worse(found: list[float], right: list[float]) -> bool:
    if len(found) != len(right):
        return True
    return not all(x <= 1.01 * y + 1e-6 for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("op", ["s_waitcnt", "s_barrier"])
@pytest.mark.parametrize("kernel", [0, 1], ids=["forward", "backward"])
def test_most_missing_waits_and_barriers_are_noticed(
    op: str, kernel: int, gpu_of: Callable[[str], Gpu]
):
    """Not all are: some instructions stand twice, or keep an order that nothing needs."""
    case: KernelCase = FORWARD_AND_BACKWARD
    gpu = gpu_of(case.arch)
    check = Check.of(case.case, parse(case.arch), gpu.emulator)
    right = _errors(gpu, check)
    assert max(right) <= 1
    ops = gpu.machine.ops
    loaded = gpu.machine.loaded.items()
    code = next(y for (x, _), (_, y) in loaded if x.stem == case.kernels[kernel])
    chosen = [x for x in code.instructions if x.op == ops[op]]
    noticed: list[bool] = []
    for instruction in chosen:
        with _replaced(instruction, ops["s_endpgm"]):
            runs = _are_worse(_errors(gpu, check), right)
        if runs:
            with _replaced(instruction, ops["s_nop"]):
                noticed.append(_are_worse(_errors(gpu, check), right))
    assert len(noticed) >= 3 and sum(noticed) >= 0.6 * len(noticed)
