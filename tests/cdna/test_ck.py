"""Calls on CK's machine code, dense and split-KV, which tests/scripts/compile_ck.py makes.

AITER's host code chooses among many such kernels and fills their arguments; here
tests/support/cdna/ck.py does so for one of each kind.
"""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

from collections.abc import Iterator

import pytest

from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support import aiter_emulated
from tests.support.aiter_check import Check
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.cdna import disassembler
from tests.support.cdna.cases import SCHEDULES, case
from tests.support.cdna.ck import KERNELS, CkGpu, code_of, folder
from tests.support.cdna.generations import dispatch
from tests.support.cdna.listings import machine
from tests.support.cdna.wait_states import too_soon

_FACTS = {"h": 64, "b": 2, "n": 4, "k": 2}
CASES = (case("full", t=150, s=97, **_FACTS), case("few queries", t=20, s=300, **_FACTS))
_SERVING = {"h": 64, "b": 3, "n": 4, "k": 2, "inference": True}
_LENGTHS = (517, 0, 384)
"""A row that ends in the middle of a tile of keys, an empty one, and one at the end of a tile."""
SPLIT_CASES = (
    case("cache", t=2, s=640, kv_lengths=_LENGTHS, **_SERVING),
    case("pages", t=1, s=640, page=128, kv_lengths=_LENGTHS, **_SERVING),
    case("one split", t=100, s=128, page=128, kv_lengths=(128, 0, 77), **_SERVING),
)


@pytest.fixture
def gpu(without_rewrites: None) -> Iterator[CkGpu]:
    missing = disassembler.library()
    if folder() is None or isinstance(missing, str):
        pytest.skip("ATTN_DISPATCH_TEST_CK names no folder of compile_ck, or LLVM is missing")
    with aiter_emulated.arch("gfx942") as emulator:
        found = CkGpu(dispatch("dev18", "gfx942"), machine(), emulator)
        emulator.set_server(found.serve)
        yield found


@pytest.mark.parametrize("call", CASES, ids=str)
def test_kernels_of_ck_agree_with_the_reference(call: Case, gpu: CkGpu):
    """In every order of events, with NaN in what must be written and in registers."""
    check = Check.of(call, parse("gfx942"), gpu.emulator)
    for gpu.schedule in SCHEDULES:
        gpu.ran = []
        errors = check.errors()
        assert gpu.ran == ["forward", "dot_do_o", "backward", "convert_dq"]
        assert max(errors.values()) <= 1, (gpu.schedule, errors)
        assert gpu.conflicts == [], gpu.schedule


@pytest.mark.parametrize("call", SPLIT_CASES, ids=str)
def test_split_kv_kernels_of_ck_agree_with_the_reference(call: Case, gpu: CkGpu):
    """Each split of a row's keys, and their combination; NaN past the lengths and in scratch."""
    check = Check.of(call, parse("gfx942"), gpu.emulator)
    ((split, kernel),) = check.chosen.values()
    struct = struct_of(split, use_asm=False, num_splits=kernel.num_splits)
    _, (chosen,) = gpu.dispatch.run(struct)  # AITER's own choice is the kernel that is compiled
    assert f"paged={str(bool(call.page)).lower()} tile=64x64 pads=true,true,false,false" in chosen
    for gpu.schedule in SCHEDULES:
        gpu.ran = []
        errors = check.errors()
        assert gpu.ran == ["paged_split_kv" if call.page else "split_kv", "combine"]
        assert max(errors.values()) <= 1, (gpu.schedule, errors)
        assert gpu.conflicts == [], gpu.schedule


@pytest.mark.parametrize("name", KERNELS)
def test_compiler_leaves_wait_states_in_cks_kernels(name: str, gpu: CkGpu):
    assert too_soon(code_of(gpu.machine, name), gpu.machine.ops, "gfx942") == []
