"""AITER v0.1.15 and later: its dispatch, compiled from its sources, behind this project's adapter.

The sources are those that ATTN_DISPATCH_AITER_DIR names. A fake HIP records what is launched.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from attn_dispatch.aiter.arrays import dq_acc, num_bytes
from attn_dispatch.aiter.call import AiterCall
from tests.support.aiter_dispatch import grid
from tests.support.aiter_dispatch.calls import POINTER, struct_of
from tests.support.aiter_dispatch.launches import ARCHS, atomic_32
from tests.support.aiter_v0_1_15 import build
from tests.support.aiter_v0_1_15.library import dispatch

pytestmark = pytest.mark.skipif(bool(build.missing_sources()), reason=build.missing_sources())

CAUSAL = {"mask": "bottom_right", "window_right": 0}
PACKED = {"is_group": True, "batch": 4, "seq_len_q": 2000, "seq_len_kv": 2200}


def of(call: AiterCall):
    return struct_of(call, use_asm=True, accumulator=atomic_32(call), generation="v0.1.15")


def _names(records: list[str], arch: str) -> list[str]:
    """The kernels that were launched, each of which must be made for the architecture."""
    lines = [line.split() for line in records]
    assert all(line[0] == "asm" and line[2] == arch for line in lines), records
    return [line[1] for line in lines]


@ARCHS
def test_the_library_says_what_it_is(arch):
    table = dispatch(arch).table
    assert (table.generation, table.arch) == (b"v0.1.15", arch.encode())


@ARCHS
def test_a_dense_forward_call_launches_its_kernel(arch):
    aiter = dispatch(arch)
    failed, records = aiter.run(of(replace(grid.CALL, seq_len_q=1000, max_seq_len_q=1000)))
    rounding = "_rtne" if arch == "gfx942" else ""
    assert not failed
    assert _names(records, arch)[0].endswith(f"fmha_fwd_hd128_bf16{rounding}E")
    ((grid_and_block, arguments),) = aiter.take_launches()
    assert grid_and_block == (4, 8, 2, 512)  # tiles of 256 queries, heads, batch rows
    assert struct.unpack_from("<Q", arguments, 0)[0] == POINTER  # the output


@ARCHS
def test_a_dense_backward_call_launches_three_kernels(arch):
    aiter = dispatch(arch)
    failed, records = aiter.run(of(replace(grid.CALL, backward=True)))
    assert not failed
    before, main, after = _names(records, arch)
    assert "odo" in before and "bf16_a32" in main and "dq_convert" in after
    assert len(aiter.take_launches()) == 3


@ARCHS
@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_packed_forward_call_gets_its_lengths_and_a_grid_of_the_longest(arch, has_gaps):
    """Physical starts come beside the prefix sums of lengths: offsets of fmha_fwd_v3_args."""
    aiter = dispatch(arch)
    failed, records = aiter.run(of(replace(grid.CALL, **PACKED, has_gaps=has_gaps)))
    assert not failed
    assert _names(records, arch)[0].endswith("_groupE")
    ((grid_and_block, arguments),) = aiter.take_launches()
    assert grid_and_block == (8, 4, 2, 512)  # heads, sequences, tiles of the longest, not of all
    logical_q, logical_k, _, physical_q, physical_k = (
        struct.unpack_from("<Q", arguments, 0x1B0 + 16 * i)[0] for i in range(5)
    )
    sums = POINTER + 0x100 if has_gaps else POINTER
    assert (logical_q, logical_k, physical_q, physical_k) == (sums, sums, POINTER, POINTER)


@ARCHS
@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_packed_backward_call_gets_its_lengths(arch, has_gaps):
    """In fmha_bwd_dqdkdv_args the prefix sums are at 0x250, and the starts at 0x270."""
    aiter = dispatch(arch)
    failed, records = aiter.run(of(replace(grid.CALL, **PACKED, has_gaps=has_gaps, backward=True)))
    assert not failed
    assert all("group" in name for name in _names(records, arch))
    _, (grid_and_block, arguments), _ = aiter.take_launches()
    assert grid_and_block[1:3] == (8, 4)
    starts = [struct.unpack_from("<Q", arguments, 0x250 + 16 * i)[0] for i in range(4)]
    sums = POINTER + 0x100 if has_gaps else POINTER
    assert starts == [sums, sums, POINTER, POINTER]


@ARCHS
def test_scratch_is_as_large_as_aiter_asks(arch):
    """AITER asks for its scratch before it launches anything: with none it names the size."""
    aiter, asked = dispatch(arch), 0
    for call in filter(lambda call: call.backward, grid.calls()):
        for accumulator in ("atomic_32", "atomic_16"):
            given = struct_of(call, use_asm=True, accumulator=accumulator, generation="v0.1.15")
            if not aiter.takes_asm(given):
                continue
            given.dq_acc_bytes = 0
            failed, records = aiter.run(given)
            adds_to_dq = accumulator == "atomic_16" and (arch == "gfx942" or call.head_dim == 64)
            if adds_to_dq:
                assert not failed and len(records) == 2, call
                continue
            expected = num_bytes(dq_acc(call, accumulator))
            assert f" asks for {expected} bytes of scratch, and the call has 0" in failed, call
            assert not records
            asked += 1
    assert asked >= 100


@ARCHS
def test_scratch_of_exactly_the_size_is_enough(arch):
    call = replace(grid.CALL, backward=True)
    given = of(call)
    assert not dispatch(arch).run(given)[0]
    given.dq_acc_bytes -= 1
    assert "bytes of scratch" in dispatch(arch).run(given)[0]


FAILURES = {
    "hipModuleLaunchKernel": 'the launch of a kernel failed with "an error of the fake HIP"',
    "hipGetDevice": "HIP cannot describe the current device: an error of the fake HIP",
}


@ARCHS
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_failure_of_hip_is_a_sentence(arch, name, backward):
    """AITER alone would abort the process."""
    aiter = dispatch(arch)
    aiter.fail_call(name, 0)
    failed, records = aiter.run(of(replace(grid.CALL, backward=backward)))
    assert FAILURES[name] in failed and not records
    assert not aiter.run(of(replace(grid.CALL, backward=backward)))[0]


def test_a_library_refuses_a_device_of_another_architecture():
    """AITER alone would launch the kernels of the device that loaded them first."""
    dispatch("gfx942")
    aiter = dispatch("gfx942")
    aiter.set_gpu_of(5, "gfx950")
    aiter.set_device(5)
    try:
        for backward in (False, True):
            failed, records = aiter.run(of(replace(grid.CALL, backward=backward)))
            assert failed == "this AITER is built for gfx942, and the current device is gfx950"
            assert not records
    finally:
        aiter.set_device(0)


REFUSED = {
    "soft cap": ({"logits_soft_cap": 30.0}, "would ignore logits_soft_cap"),
    "top-left": (
        {**PACKED, "mask": "top_left", "window_right": 0, "seq_len_kv": 2000},
        "take a top-left mask of packed sequences for a bottom-right one",
    ),
}


@ARCHS
@pytest.mark.parametrize("facts, sentence", REFUSED.values(), ids=REFUSED)
def test_what_aiter_would_drop_in_silence_is_refused(arch, facts, sentence):
    given = of(replace(grid.CALL, **facts))
    failed, records = dispatch(arch).run(given)
    assert sentence in failed and not records
    assert not dispatch(arch).takes_asm(given)


@ARCHS
def test_lengths_that_asm_ignores_are_refused(arch):
    given = of(replace(grid.CALL, **PACKED, has_gaps=True))
    given.call.seqlen_k = POINTER
    failed, records = dispatch(arch).run(given)
    assert "take lengths as prefix sums" in failed and not records


@ARCHS
def test_without_ck_a_call_of_ck_is_refused(arch):
    aiter = dispatch(arch)
    for call in (grid.CALL, replace(grid.CALL, backward=True), grid.split_calls()[0]):
        failed, records = aiter.run(struct_of(call, use_asm=False, generation="v0.1.15"))
        assert "no CK" in failed and not records
