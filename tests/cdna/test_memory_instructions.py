"""Buffers, atomics and LDS: addresses, offsets, ranges, inactive lanes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cdna.formulas import floats
from tests.support.cdna.listings import LANES, LDS_BYTES, lanes_of, run, set_exec
from tests.support.cdna.machine import Landing, Machine, Schedule, Wrong

BITS = np.random.default_rng(0).integers(0, 2**32, (8, 64), np.uint32)
LANDINGS: tuple[Landing, ...] = ("at once", "late", "random", "timed")
MASK = 0x00F0_FFFF_1234_5678
ALL = 2**64 - 1


def test_offsets_of_a_buffer_load_are_added(machine: Machine):
    text = """
        s_mov_b32 s10, 0x100
        buffer_load_dword v64, v3, s[4:7], 0 offen
        buffer_load_dword v65, v3, s[4:7], s10 offen
        buffer_load_dword v66, v3, s[4:7], s10 offen offset:512
        buffer_load_dword v67, off, s[4:7], s10 offset:12
        v_lshlrev_b32_e32 v4, 4, v0
        buffer_load_dwordx4 v[68:71], v4, s[4:7], 0 offen offset:16
        s_waitcnt vmcnt(0)
    """
    got = run(machine, text, BITS, 8).values[0]
    for n, row in enumerate((0, 1, 3)):
        np.testing.assert_array_equal(got[n], BITS[row])
    np.testing.assert_array_equal(got[3], BITS[1, 3])
    words = BITS.reshape(-1)[4 * LANES[:, None] + np.arange(4, 8)]
    np.testing.assert_array_equal(got[4:8], words.T)


def test_range_of_a_buffer_counts_bytes_or_records(machine: Machine):
    """What is out of range is 0, dword by dword; the scalar offset counts."""
    by_bytes = """
        v_mov_b32_e32 v64, 7
        s_mov_b32 s6, 0x50
        buffer_load_dword v64, v3, s[4:7], 0 offen
        s_mov_b32 s10, 32
        buffer_load_dword v65, v3, s[4:7], s10 offen
        v_lshlrev_b32_e32 v4, 3, v0
        buffer_load_dwordx4 v[66:69], v4, s[4:7], 0 offen
        s_waitcnt vmcnt(0)
    """
    got = run(machine, by_bytes, BITS, 6).values[0]
    np.testing.assert_array_equal(got[0], np.where(LANES < 20, BITS[0], 0))
    np.testing.assert_array_equal(got[1], np.where(LANES < 12, np.roll(BITS[0], -8), 0))
    for n in range(4):
        place = 2 * LANES + n
        np.testing.assert_array_equal(got[2 + n], np.where(place < 20, BITS[0][place % 64], 0))
    by_records = """
        s_and_b32 s5, s5, 0xffff
        s_or_b32 s5, s5, 0x80000
        s_mov_b32 s6, 10
        buffer_load_dword v64, v0, s[4:7], 0 idxen
        buffer_load_dword v65, v0, s[4:7], 0 idxen offset:4
        s_and_b32 s5, s5, 0xffff
        s_waitcnt vmcnt(0)
    """
    got = run(machine, by_records, BITS, 2).values[0]
    for n in range(2):
        even = BITS[0][(2 * LANES + n) % 64]
        np.testing.assert_array_equal(got[n], np.where(LANES < 10, even, 0))


def test_inactive_lanes_load_and_store_nothing(machine: Machine):
    text = f"""
        v_mov_b32_e32 v64, 7
        {set_exec(MASK)}
        buffer_load_dword v64, v3, s[4:7], 0 offen
        buffer_store_dword v9, v3, s[4:7], 0 offen offset:512
        s_waitcnt vmcnt(0)
        {set_exec(ALL)}
    """
    outcome, on = run(machine, text, BITS), lanes_of(MASK)
    np.testing.assert_array_equal(outcome.values[0, 0], np.where(on, BITS[0], 7))
    np.testing.assert_array_equal(outcome.memory[2], np.where(on, BITS[1], BITS[2]))


def test_stores_of_one_and_four_dwords_end_at_the_range(machine: Machine):
    text = """
        v_lshlrev_b32_e32 v4, 4, v0
        s_mov_b32 s6, 0x208
        buffer_store_dwordx4 v[12:15], v4, s[4:7], 0 offen
        buffer_store_dword v8, v3, s[4:7], 0 offen offset:256
        s_waitcnt vmcnt(0)
    """
    memory = run(machine, text, BITS).memory
    expected = BITS.reshape(-1).copy()
    expected[:130] = BITS[4:8].T.reshape(-1)[:130]
    expected[64:128] = BITS[0]
    np.testing.assert_array_equal(memory.reshape(-1), expected)


def _sum_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (floats(a) + floats(b)).view(np.uint32)


def _sum_halves(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
    both = (np.ascontiguousarray(x).view(np.uint16).view(dtype).astype(np.float32) for x in (a, b))
    return sum(both, np.float32(0)).astype(dtype).view(np.uint16).view(np.uint32)


ATOMICS = {
    "buffer_atomic_add_f32": _sum_f32,
    "buffer_atomic_pk_add_bf16": lambda a, b: _sum_halves(a, b, jnp.bfloat16),
    "buffer_atomic_pk_add_f16": lambda a, b: _sum_halves(a, b, np.float16),
    "global_atomic_pk_add_bf16": lambda a, b: _sum_halves(a, b, jnp.bfloat16),
}


@pytest.mark.parametrize("landing", LANDINGS)
@pytest.mark.parametrize("op", ATOMICS)
def test_atomics_add_to_memory(op: str, landing: Landing, machine: Machine):
    """Each active lane adds to its own dword, and once more all to one."""
    dtype = np.float32 if op.endswith("f32") else jnp.bfloat16 if "bf16" in op else np.float16
    random = np.random.default_rng(1)
    drawn = random.standard_normal((2, 64 * 4 // np.dtype(dtype).itemsize)).astype(dtype)
    rows = [*drawn.view(np.uint32), np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
    ones = np.ones(64 * 4 // np.dtype(dtype).itemsize, dtype).view(np.uint32)
    is_buffer = op.startswith("buffer")
    first, second = (
        (f"{op} v9, v3, s[4:7], 0 offen", f"{op} v12, v4, s[4:7], 0 offen offset:512")
        if is_buffer
        else (f"{op} v3, v9, s[12:13]", f"{op} v4, v12, s[12:13] offset:512")
    )
    text = f"""
        s_mov_b32 s12, s4
        s_and_b32 s13, s5, 0xffff
        v_mov_b32_e32 v4, 0
        {set_exec(MASK)}
        {first}
        {second}
        s_waitcnt vmcnt(0)
        {set_exec(ALL)}
    """
    memory = run(machine, text, [*rows, ones], schedule=Schedule(landing, seed=2)).memory
    on = lanes_of(MASK)
    np.testing.assert_array_equal(memory[0], np.where(on, ATOMICS[op](*rows[:2]), rows[0]))
    np.testing.assert_array_equal(memory[2, :1].view(dtype).astype(np.float32), on.sum())
    assert not memory[2, 1:].any()


@pytest.mark.parametrize("landing", LANDINGS)
@pytest.mark.parametrize("dwords", [1, 4])
def test_loads_to_lds_put_lanes_side_by_side(dwords: int, landing: Landing, machine: Machine):
    """At M0 and the instruction's offset; what is out of the buffer's range is 0 there."""
    size = "" if dwords == 1 else "x4"
    text = f"""
        s_mov_b32 m0, 0x100
        s_mov_b32 s6, 0x80
        v_lshlrev_b32_e32 v4, {2 if dwords == 1 else 4}, v0
        buffer_load_dword{size} v4, s[4:7], 0 offen offset:64 lds
        s_waitcnt vmcnt(0)
        ds_read_b32 v64, v3 offset:{256 + 64}
        s_waitcnt lgkmcnt(0)
    """
    got = run(machine, text, BITS, schedule=Schedule(landing, seed=3, fill=9)).values[0, 0]
    np.testing.assert_array_equal(got, np.where(LANES < 16, np.roll(BITS[0], -16), 0))


@pytest.mark.parametrize("landing", LANDINGS)
def test_lds_writes_and_reads_of_every_width(landing: Landing, machine: Machine):
    text = f"""
        v_lshlrev_b32_e32 v4, 4, v0
        v_mov_b32_e32 v64, 7
        ds_write_b128 v4, v[8:11] offset:64
        ds_write_b64 v4, v[12:13] offset:72
        {set_exec(MASK)}
        ds_write_b32 v4, v14 offset:64
        ds_read_b32 v64, v4 offset:68
        {set_exec(ALL)}
        ds_read_b128 v[65:68], v4 offset:64
        ds_read_b64 v[69:70], v4 offset:72
        s_waitcnt lgkmcnt(0)
    """
    got = run(machine, text, BITS, 7, schedule=Schedule(landing, seed=4)).values[0]
    on = lanes_of(MASK)
    np.testing.assert_array_equal(got[0], np.where(on, BITS[1], 7))
    np.testing.assert_array_equal(got[1], np.where(on, BITS[6], BITS[0]))
    np.testing.assert_array_equal(got[2:5], BITS[[1, 4, 5]])
    np.testing.assert_array_equal(got[5:], BITS[4:6])


def test_lds_out_of_range_reads_zero_and_keeps_nothing(machine: Machine):
    text = f"""
        v_mov_b32_e32 v64, 7
        v_mov_b32_e32 v65, 7
        ds_write_b32 v3, v8 offset:{LDS_BYTES - 32}
        ds_read_b32 v64, v3 offset:{LDS_BYTES - 32}
        ds_read_b32 v65, v3
        s_waitcnt lgkmcnt(0)
    """
    outcome = run(machine, text, BITS, 2, schedule=Schedule(fill=3))
    np.testing.assert_array_equal(outcome.values[0, 0], np.where(LANES < 8, BITS[0], 0))
    np.testing.assert_array_equal(outcome.values[0, 1], 3)
    assert outcome.result.lds_out_of_range == 2 * 56


def test_lds_transposed_read(machine: Machine):
    """Each 16 lanes' 16 rows of 4 half words are read as 4 rows of 16, transposed."""
    text = """
        v_lshlrev_b32_e32 v10, 3, v0
        ds_write_b64 v10, v[8:9] offset:512
        ds_read_b64_tr_b16 v[64:65], v10 offset:512
        s_waitcnt lgkmcnt(0)
    """
    got = run(machine, text, BITS[:2], 2).values[0]
    source, moved = (np.ascontiguousarray(x.T).view(np.uint16) for x in (BITS[:2], got))
    for lane in range(64):
        block = source[lane & ~15 : (lane & ~15) + 16].reshape(4, 16)
        np.testing.assert_array_equal(moved[lane], block[:, lane % 16])


def test_lanes_send_their_numbers_to_other_lanes(machine: Machine):
    """The last lane that sends to a lane wins; a lane to which none sends gets 0."""
    text = f"""
        v_lshlrev_b32_e32 v10, 3, v0
        {set_exec(ALL - (1 << 40))}
        ds_permute_b32 v64, v10, v8
        s_waitcnt lgkmcnt(0)
        {set_exec(ALL)}
    """
    got = run(machine, "v_mov_b32_e32 v64, 5\n" + text, BITS[:1]).values[0, 0]
    expected = np.zeros(64, np.uint32)
    expected[::2] = BITS[0, 32:]
    expected[16] = BITS[0, 8]  # lane 40 is inactive
    expected[40] = 5
    np.testing.assert_array_equal(got, expected)


WRONG_ADDRESSES = (
    ("in no buffer", "s_add_u32 s4, s4, 0x10000\nbuffer_load_dword v64, v3, s[4:7], 0 offen"),
    ("in no buffer", "s_mov_b32 s6, 0x10000\nbuffer_store_dword v8, off, s[4:7], 0 offset:4092"),
    ("in no buffer", "s_and_b32 s5, s5, 0xffff\ns_load_dword s10, s[4:5], 0x4000"),
    ("multiple of 4", "buffer_load_dword v64, v3, s[4:7], 0 offen offset:2"),
    ("LDS address .* multiple of 4", "ds_read_b32 v64, v3 offset:2"),
    ("LDS address .* multiple of 4", "ds_write_b64 v3, v[8:9] offset:1"),
)


@pytest.mark.parametrize("sentence, text", WRONG_ADDRESSES)
def test_wrong_addresses_are_noticed(sentence: str, text: str, machine: Machine):
    with pytest.raises(Wrong, match=sentence):
        run(machine, text + "\ns_waitcnt vmcnt(0) lgkmcnt(0)", BITS)


def test_one_byte_past_a_buffer_is_noticed(machine: Machine):
    """The descriptor of the buffer may be too long; the memory is not."""
    text = (
        "s_mov_b32 s6, 0x10000\nbuffer_load_dword v64, off, s[4:7], 0 offset:{}\ns_waitcnt vmcnt(0)"
    )
    size = 9 * 256  # eight rows of inputs, and the result
    run(machine, text.format(size - 4), BITS)
    with pytest.raises(Wrong, match="in no buffer"):
        run(machine, text.format(size), BITS)
