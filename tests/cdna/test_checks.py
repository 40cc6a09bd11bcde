"""What the interpreter notices: missing waits, missing barriers, and what it does not know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.cdna.decoder import decode
from tests.support.cdna.formulas import RULES
from tests.support.cdna.listings import LANES, assert_same, kernel, listing, machine, run
from tests.support.cdna.machine import Landing, Schedule, Wrong

BITS = np.random.default_rng(0).integers(0, 2**32, (1, 64), np.uint32)
LANDINGS: tuple[Landing, ...] = ("at once", "late", "random", "timed")
EARLY = """
    v_mov_b32_e32 v64, 7
    {load}
    {use}
    s_waitcnt vmcnt(0) lgkmcnt(0)
"""
LOADS = {
    "buffer": "buffer_load_dword v64, v3, s[4:7], 0 offen",
    "LDS": "ds_read_b32 v64, v3",
}
USES = {
    "read": "v_mov_b32_e32 v65, v64",
    "written": "v_mov_b32_e32 v64, 3",
    "stored": "buffer_store_dword v64, v3, s[4:7], 0 offen",
    "an address": "ds_read_b32 v66, v64",
    "one of several": "v_pk_add_f32 v[66:67], v[63:64], v[63:64]",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("load", LOADS)
def test_register_used_before_its_load_is_waited_for(load: str, use: str):
    strict = Schedule("late", registers=True)
    text = EARLY.format(load=LOADS[load], use=USES[use])
    with pytest.raises(Wrong, match="v64 is used before its load has been waited for"):
        run(text, BITS, 2, schedule=strict)
    run(text.replace(USES[use], "s_waitcnt vmcnt(0) lgkmcnt(0)"), BITS, 2, schedule=strict)


def test_scalar_register_used_before_its_load_is_waited_for():
    text = "s_and_b32 s5, s5, 0xffff\ns_load_dwordx2 s[10:11], s[4:5], 0x0\ns_mov_b32 s12, s11"
    with pytest.raises(Wrong, match="s11 is used before its load has been waited for"):
        run(text, BITS, schedule=Schedule("late", registers=True))
    run(text.replace("s_mov", "s_waitcnt lgkmcnt(0)\ns_mov"), BITS,
        schedule=Schedule("late", registers=True))  # fmt: skip


def test_late_data_is_late_without_the_check_too():
    text = EARLY.format(load=LOADS["buffer"], use=USES["read"])
    at_once = run(text, BITS, 2).values[0]
    assert_same(at_once[1], BITS[0])
    late = run(text, BITS, 2, schedule=Schedule("late")).values[0]
    assert_same(late[1], 7)
    assert_same(late[0], BITS[0])


def test_wait_counts_what_may_be_left():
    """Vector loads land in the order of their issue: vmcnt(1) covers the first of two."""
    text = """
        buffer_load_dword v64, v3, s[4:7], 0 offen
        buffer_load_dword v65, v3, s[4:7], 0 offen
        s_waitcnt vmcnt({})
        v_mov_b32_e32 v66, v64
        s_waitcnt vmcnt(0)
    """
    strict = Schedule("late", registers=True)
    got = run(text.format(1), BITS, 3, schedule=strict).values[0]
    assert_same(got[2], BITS[0])
    with pytest.raises(Wrong, match="v64 is used"):
        run(text.format(2), BITS, 3, schedule=strict)
    lds = text.replace("buffer_load_dword", "ds_read_b32").replace(", s[4:7], 0 offen", "")
    lds = lds.replace("vmcnt", "lgkmcnt")
    run(lds.format(1), BITS, 3, schedule=strict)
    with pytest.raises(Wrong, match="v64 is used"):
        run(lds.format(2), BITS, 3, schedule=strict)


@pytest.mark.parametrize("landing", LANDINGS)
def test_store_takes_its_data_at_its_issue(landing: Landing):
    text = """
        v_mov_b32_e32 v10, v8
        buffer_store_dword v10, v3, s[4:7], 0 offen offset:256
        ds_write_b32 v3, v10
        v_mov_b32_e32 v10, 1
        ds_read_b32 v64, v3
        s_waitcnt vmcnt(0) lgkmcnt(0)
    """
    inputs = [BITS[0], np.zeros(64, np.uint32)]
    outcome = run(text, inputs, schedule=Schedule(landing, seed=1))
    assert_same(outcome.memory[1], BITS[0])
    assert_same(outcome.values[0, 0], BITS[0])


EXCHANGE = """
    v_mul_i32_i24_e32 v10, 0x100, v2
    v_add_u32_e32 v10, v10, v3
    v_mov_b32_e32 v11, s8
    {write}
    s_waitcnt vmcnt(0) lgkmcnt(0)
    {barrier}
    v_xor_b32_e32 v10, 0x100, v10
    ds_read_b32 v64, v10
    s_waitcnt lgkmcnt(0)
"""
WRITE = "ds_write_b32 v10, v11"


@pytest.mark.parametrize("seed", [-1, 0, 1, 2])
@pytest.mark.parametrize("landing", LANDINGS)
def test_waves_meet_at_barriers(landing: Landing, seed: int):
    schedule = Schedule(landing, seed=seed, quantum=2, conflicts=True)
    text = EXCHANGE.format(write=WRITE, barrier="s_barrier")
    outcome = run(text, waves=2, schedule=schedule)
    assert outcome.result.conflicts == []
    assert_same(outcome.values[0], 1)
    assert_same(outcome.values[1], 0)


@pytest.mark.parametrize("seed", [-1, 0, 1, 2])
@pytest.mark.parametrize("landing", LANDINGS)
def test_missing_barrier_is_noticed_in_any_order(landing: Landing, seed: int):
    schedule = Schedule(landing, seed=seed, quantum=2, conflicts=True)
    text = EXCHANGE.format(write=WRITE, barrier="s_nop 0")
    (conflict, *_) = run(text, waves=2, schedule=schedule).result.conflicts
    assert "barriers passed 0 to 0" in conflict
    assert ("cycles apart" in conflict) == (landing == "timed")


def test_overwritten_reads_and_equal_writes():
    """A write that may overtake a read conflicts; writes of one value do not, unless read."""
    checked = Schedule(conflicts=True)
    read_then_write = (
        "ds_read_b32 v64, v3\ns_waitcnt lgkmcnt(0)\n{}\nds_write_b32 v3, v2\ns_waitcnt lgkmcnt(0)"
    )
    assert run(read_then_write.format(""), waves=2, schedule=checked).result.conflicts
    ordered = read_then_write.format("s_barrier").replace(
        "ds_write_b32 v3, v2", "ds_write_b32 v3, v0"
    )
    assert run(ordered, waves=2, schedule=checked).result.conflicts == []
    assert run(read_then_write.format("s_barrier"), waves=2, schedule=checked).result.conflicts


@pytest.mark.parametrize("seed, kinds", [(0, ("read", "written")), (-1, ("written", "read"))])
def test_one_wave_reads_and_another_writes(seed: int, kinds: tuple[str, str]):
    text = """
        s_cmp_eq_u32 s8, 0
        s_cbranch_scc1 1
        ds_write_b32 v3, v3
        s_cbranch_scc0 1
        ds_read_b32 v64, v3
        s_waitcnt lgkmcnt(0)
    """
    (conflict,) = run(text, waves=2, schedule=Schedule(seed=seed, conflicts=True)).result.conflicts
    assert conflict.index(f"{kinds[0]} at") < conflict.index(f"{kinds[1]} at")


@pytest.mark.parametrize("seed", [0, -1])
def test_read_that_lands_after_a_barrier(seed: int):
    """A wave may pass a barrier with a read outstanding. If LDS takes accesses in the order of
    their issue, the read is before another wave's next write; if not, it is a conflict."""
    text = """
        v_mov_b32_e32 v64, v2
        ds_read_b32 v64, v3
        s_barrier
        s_cmp_eq_u32 s8, 0
        s_cbranch_scc1 1
        ds_write_b32 v3, v3
        s_waitcnt lgkmcnt(0)
    """
    late = Schedule("late", seed=seed, conflicts=True)
    assert run(text, waves=2, schedule=late).result.conflicts == []
    outcome = run(text, waves=2, schedule=replace(late, lds_queue=False))
    assert outcome.result.conflicts
    assert_same(outcome.values[0, 0], 4 * LANES if seed else 0)  # wave 1 was first, or last


def test_loads_to_lds_are_waited_for_by_their_wave():
    """The data is in LDS after vmcnt, and in another wave's sight after a barrier."""
    write = "s_mul_i32 s10, s8, 0x100\ns_mov_b32 m0, s10\nbuffer_load_dword v3, s[4:7], 0 offen lds"
    right = EXCHANGE.format(write=write, barrier="s_barrier")
    strict = Schedule("late", conflicts=True)
    outcome = run(right, BITS, waves=2, schedule=strict)
    assert outcome.result.conflicts == []
    assert_same(outcome.values[:, 0], [BITS[0], BITS[0]])
    too_early = right.replace("s_waitcnt vmcnt(0) lgkmcnt(0)", "s_nop 0")
    assert run(too_early, BITS, waves=2, schedule=strict).result.conflicts


def test_registers_and_lds_start_with_the_fill():
    text = (
        "v_mov_b32_e32 v64, v99\nv_mov_b32_e32 v65, s90\nds_read_b32 v66, v3\ns_waitcnt lgkmcnt(0)"
    )
    got = run(text, results=3, schedule=Schedule(fill=0x7FC00BAD)).values
    assert_same(got, 0x7FC00BAD)


UNKNOWN = (
    ("v_sin_f32_e32 v64, v8", "v_sin_f32"),
    ("v_add_f32_e64 v64, v8, v9 clamp", "clamp"),
    ("v_mul_f32_e64 v64, v8, v9 mul:2", "mul:2"),
    ("v_mov_b32_dpp v64, v8 row_shr:1 row_mask:0xf bank_mask:0xf", "row_shr:1"),
    ("v_mov_b32_dpp v64, v8 quad_perm:[0,0,0,0] row_mask:0xf bank_mask:0x3", "quad_perm"),
    ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1", "cbsz:1"),
    ("buffer_load_dword v64, v3, s[4:7], 0 offen sc0", "sc0"),
    ("s_waitcnt_vscnt null, 0x0", "s_waitcnt_vscnt"),
)


@pytest.mark.parametrize("text, named", UNKNOWN)
def test_unknown_instructions_and_modifiers_are_refused(text: str, named: str):
    with pytest.raises(NotImplementedError, match=named):
        decode(listing(text), machine().ops)


NOT_MODELLED = (
    ("s_or_b32 s5, s5, 0x80000000\nbuffer_load_dword v64, v3, s[4:7], 0 offen", "swizzled"),
    ("s_or_b32 s7, s7, 0x800000\nbuffer_load_dword v64, v3, s[4:7], 0 offen", "ADD_TID"),
    ("buffer_load_dword v64, v[3:4], s[4:7], 0 idxen offen", "idxen with offen"),
    ("s_mov_b32 exec_lo, 1\nv_permlane16_swap_b32_e32 v64, v65", "inactive lanes"),
    (
        "s_mov_b32 exec_lo, 1\nds_read_b64_tr_b16 v[64:65], v3\ns_waitcnt lgkmcnt(0)",
        "inactive lanes",
    ),
)


@pytest.mark.parametrize("text, sentence", NOT_MODELLED)
def test_what_is_not_modelled_is_refused_when_it_runs(text: str, sentence: str):
    with pytest.raises(Wrong, match=sentence):
        run(text, BITS)


def test_program_without_end_is_noticed():
    with pytest.raises(Wrong, match="too many instructions"):
        run("s_branch 65535", schedule=Schedule(most_instructions=10_000))
    with pytest.raises(Wrong, match="the program counter left the code"):
        machine().run(
            kernel(), decode(listing("s_nop 0"), machine().ops), grid=(1, 1, 1), threads=64,
            arguments=b"", buffers=[],
        )  # fmt: skip
    run("s_endpgm\ns_branch 65535")


def test_arguments_end_where_the_kernels_metadata_says():
    for offset, is_right in ((12, True), (16, False)):
        text = f"s_load_dword s10, s[0:1], {offset:#x}\ns_waitcnt lgkmcnt(0)"
        if is_right:
            run(text)
        else:
            with pytest.raises(Wrong, match="in no buffer"):
                run(text)


def test_every_instruction_is_named_in_a_test():
    """The vector instructions with formulas are tested one by one, others by name."""
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [op for op in machine().ops if op not in RULES and op not in texts] == []
