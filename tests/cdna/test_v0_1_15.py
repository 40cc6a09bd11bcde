"""Calls on the machine code of AITER v0.1.15 or later (ATTN_DISPATCH_AITER_DIR: its folder)."""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import pytest

from attn_dispatch.aiter import asm_rules
from attn_dispatch.aiter.asm_rules import BEYOND_KEYS, ONE_QUERY
from attn_dispatch.devices.target import parse
from attn_dispatch.warning import AttentionKernelWarning
from attn_dispatch_tools.verify.case import Case
from tests.support.aiter_check import Check
from tests.support.cdna import generations
from tests.support.cdna.cases import (
    CASES_V0_1_15,
    CAUSAL,
    GAPS,
    NAN,
    SCHEDULES,
    TIMED,
    TOP_LEFT,
    KernelCase,
    case,
)
from tests.support.cdna.kernels import Gpu
from tests.support.cdna.machine import AT_ONCE, Schedule
from tests.support.cdna.repairs import RepairedMachine

_BATCH: dict[str, Any] = {"b": 3, "n": 4, "k": 2, "s": 70}
FEW_QUERIES = (
    case("1 query", t=1),
    case("2 queries from the top left", t=2, **_BATCH, **TOP_LEFT),
    case("3 queries", t=3, **_BATCH, dtype="float16"),
    case("8 queries from the bottom right", t=8, **_BATCH, **CAUSAL),
    case("16 queries", t=16, s=600, k=2),
)
LATE = Schedule("late", registers=True)
MISSING_BARRIERS = (
    case("causal blocks", t=600, s=600, **TOP_LEFT),
    case("192/128", h=192, v=128),
    case("causal 192/128", h=192, v=128, **CAUSAL),
    case("packed 192/128", h=192, v=128, **GAPS, **CAUSAL),
)
IN_TURN = replace(AT_ONCE, conflicts=True)


GpuOf = Callable[..., Gpu]


@pytest.fixture
def gpu_of(without_rewrites: None) -> Iterator[GpuOf]:
    """A function that makes calls of AITER run on a GPU of an architecture."""
    if missing := generations.missing("v0.1.15"):
        pytest.skip(missing)
    with ExitStack() as stack:
        yield lambda arch, *lifted: stack.enter_context(generations.gpu_of("v0.1.15", arch, lifted))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("call", CASES_V0_1_15, ids=str)
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


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("call", FEW_QUERIES, ids=str)
def test_few_queries_agree_with_the_reference(call: Case, arch: str, gpu_of: GpuOf):
    """AITER's Python gives the backward pass of up to 16 queries to CK, which is faster there."""
    gpu = gpu_of(arch)
    check = Check.of(call, parse(arch), gpu.emulator)
    for gpu.schedule in SCHEDULES:
        gpu.ran = []
        assert max(check.errors().values()) <= KernelCase(arch, call, ()).allowed, gpu.schedule
        assert "ck" not in gpu.ran and any("psskddv" in x for x in gpu.ran), gpu.ran


@pytest.mark.parametrize("mask", [{}, TOP_LEFT], ids=["full", "top left"])
def test_gfx950_reads_past_the_only_query_of_each_batch_row(mask: dict[str, Any], gpu_of: GpuOf):
    """Without our rule, which leaves calls of one batch row and those for the kernel of (192, 128).

    A query and a batch row are as many elements apart, which the kernel takes for the layout
    [queries, batch, heads, head dim]; then NUM_RECORDS is less than nothing.
    """
    call, gpu = case("one query", t=1, **_BATCH, **mask), gpu_of("gfx950")
    gpu.schedule = TIMED
    for dims, is_asm in (((128, 128), False), ((192, 128), True)):
        gpu.ran = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionKernelWarning)
            check = Check.of(replace(call, h=dims[0], v=dims[1]), parse("gfx950"), gpu.emulator)
        assert max(check.errors().values()) <= 1
        found = [x for x in gpu.ran if x.startswith("bwd_") and "odo" not in x]
        assert all(x.startswith("bwd_hd192") for x in found) and bool(found) == is_asm
    gpu = gpu_of("gfx950", ONE_QUERY.name)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"a32_psskddv.* is in no buffer"):
        Check.of(call, parse("gfx950"), gpu.emulator).errors()


@pytest.mark.parametrize("call", MISSING_BARRIERS, ids=str)
def test_repaired_kernels_of_gfx950_agree_in_every_order(call: Case, gpu_of: GpuOf):
    """One or two barriers more; without them waves in turn have wrong results."""
    gpu = gpu_of("gfx950")
    if call.v != call.h and generations.release("v0.1.15").version < (0, 1, 18):
        pytest.skip("ASM has no forward pass for head dims (192, 128) before v0.1.18")
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
    gpu_of: GpuOf, monkeypatch: pytest.MonkeyPatch
):
    """dq_convert stores what it read from LDS without an s_waitcnt; with one it is right."""
    gpu = gpu_of("gfx942")
    gpu.waits, gpu.schedule = True, LATE
    check = Check.of(case("wait"), parse("gfx942"), gpu.emulator)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"dq_convert.*v16 is used before its load"
    ):
        check.errors()
    gpu.schedule = Schedule("late", fill=NAN)
    assert max(check.errors().values()) <= 1
    monkeypatch.setattr(asm_rules, "DQ_IS_STORED_EARLY", ())
    of_the_kernel = Check.of(case("wait"), parse("gfx942"), gpu.emulator)
    assert of_the_kernel.errors()["query"] > 2
    gpu.machine = RepairedMachine()
    for gpu.schedule in (*SCHEDULES, LATE):
        assert max(of_the_kernel.errors().values()) <= 1, gpu.schedule


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
    gpu.machine = RepairedMachine()
    check = Check.of(case("repaired", t=290, s=300, **facts), parse("gfx950"), gpu.emulator)
    assert max(check.errors().values()) <= 1
    gpu = gpu_of("gfx950")
    gpu.schedule = TIMED
    for t, s, kernel in ((290, 512, "causal_br"), (200, 256, "causal_br"), (300, 300, "causal")):
        gpu.ran = []
        check = Check.of(case(f"within {t} {s}", t=t, s=s, **facts), parse("gfx950"), gpu.emulator)
        assert max(check.errors().values()) <= 1
        assert any(f"{kernel}_a32" in x for x in gpu.ran), gpu.ran
