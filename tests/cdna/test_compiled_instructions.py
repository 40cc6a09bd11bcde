"""Instructions that compilers use, CK's among them, and AITER's hand-written kernels do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.cdna.formulas import bits_of, drawn_bits, floats, flushed
from tests.support.cdna.listings import (
    LANES,
    assert_same,
    lanes_of,
    pair_and_code,
    run,
    set_exec,
    set_pair,
)  # fmt: skip
from tests.support.cdna.machine import Schedule, Wrong

ALL = 2**64 - 1
MASK = 0x00F0_FFFF_1234_5678
NUMBERS = (0x12345678_9ABCDEF0, 0x80000000_00000001, 0xFFFFFFFF, 0, 2**64 - 1)


@pytest.mark.parametrize("a", NUMBERS)
def test_scalar_instructions_on_64_bits(a: int):
    for b in NUMBERS:
        start = f"{set_pair(10, a)}\n{set_pair(12, b)}"
        both = a & b
        found = pair_and_code(f"{start}\ns_and_b64 s[14:15], s[10:11], s[12:13]")
        assert found == (both, both != 0)
        found = pair_and_code(f"{start}\ns_andn2_b64 s[14:15], s[10:11], s[12:13]")
        assert found == (a & ~b, a & ~b != 0)
        for code in (0, 1):
            choice = f"s_cmp_eq_u32 {code}, 1\ns_cselect_b64 s[14:15], s[10:11], s[12:13]"
            assert pair_and_code(f"{start}\n{choice}") == (a if code else b, code)
        start += f"\n{set_pair(14, 0)}"
        assert pair_and_code(f"{start}\ns_cmp_eq_u64 s[10:11], s[12:13]") == (0, a == b)
    for shift in (0, 2, 31, 33, 63, 66):
        shifted = (a << (shift & 63)) % 2**64
        found = pair_and_code(f"{set_pair(10, a)}\ns_lshl_b64 s[14:15], s[10:11], {shift}")
        assert found == (shifted, shifted != 0)


@pytest.mark.parametrize("x", [0, 5, 0xFFFFFFFB, 0x80000000, 0x7FFFFFFF])
def test_scalar_magnitude_and_constants_of_16_bits(x: int):
    signed = x - (x >> 31 << 32)
    start = set_pair(14, x)
    assert pair_and_code(f"{start}\ns_abs_i32 s14, s14") == (abs(signed) % 2**32, x != 0)
    code = f"{start}\ns_cmp_eq_u32 s15, 0"
    assert pair_and_code(f"{code}\ns_movk_i32 s14, 0xfff8") == (2**32 - 8, 1)
    assert pair_and_code(f"{code}\ns_mulk_i32 s14, 0xfff8") == (-8 * signed % 2**32, 1)


def test_branches_on_lanes():
    text = f"""
        v_mov_b32_e32 v64, 0
        {set_exec(0)}
        s_cbranch_execnz 2
        s_cbranch_execz 2
        s_nop 0
        s_branch 2
        {set_exec(ALL)}
        v_mov_b32_e32 v64, 1
        s_cbranch_execz 2
        s_cbranch_execnz 1
        v_mov_b32_e32 v64, 2
    """
    assert_same(run(text).values[0, 0], 1)


@pytest.mark.parametrize("vcc", [0, 1 << 40])
def test_branches_on_vcc(vcc: int):
    text = f"""
        v_mov_b32_e32 v64, 0
        v_mov_b32_e32 v65, 0
        s_mov_b32 vcc_lo, {vcc & 0xFFFFFFFF:#x}
        s_mov_b32 vcc_hi, {vcc >> 32:#x}
        s_cbranch_vccz 1
        v_mov_b32_e32 v64, 1
        s_cbranch_vccnz 1
        v_mov_b32_e32 v65, 1
    """
    assert_same(run(text, results=2).values[0, :, 0], [int(vcc != 0), int(vcc == 0)])


_PARTS = (
    ("DWORD", False, lambda x: x),
    ("BYTE_0", False, lambda x: x & 0xFF),
    ("BYTE_2", False, lambda x: x >> 16 & 0xFF),
    ("BYTE_3", True, lambda x: x.view(np.int32) >> 24),
    ("BYTE_1", True, lambda x: (x << 16).view(np.int32) >> 24),
    ("WORD_0", True, lambda x: (x << 16).view(np.int32) >> 16),
    ("WORD_1", False, lambda x: x >> 16),
)


@pytest.mark.parametrize("part, is_signed, formula", _PARTS)
def test_parts_of_sources(part: str, is_signed: bool, formula: Callable[[np.ndarray], np.ndarray]):
    a, b = drawn_bits(np.random.default_rng(7), 2)
    first, second = (f"sext({x})" if is_signed else x for x in ("v8", "v9"))
    end = "dst_sel:DWORD dst_unused:UNUSED_PAD"
    text = f"""
        v_add_u32_sdwa v64, {first}, v9 {end} src0_sel:{part} src1_sel:DWORD
        v_xor_b32_sdwa v65, v8, {second} {end} src0_sel:WORD_1 src1_sel:{part}
    """
    got = run(text, [a, b], 2).values[0]
    assert_same(got[0], formula(a).astype(np.uint32) + b)
    assert_same(got[1], a >> 16 ^ formula(b).astype(np.uint32))


def test_signs_of_packed_numbers_and_moves_of_accumulators():
    a, b, c, d = np.random.default_rng(8).standard_normal((4, 64)).astype(np.float32)
    text = """
        v_pk_add_f32 v[64:65], v[8:9], v[10:11] neg_lo:[0,1] neg_hi:[1,0]
        v_accvgpr_write_b32 a4, v8
        v_accvgpr_mov_b32 a5, a4
        v_accvgpr_read_b32 v66, a5
    """
    got = run(text, [a, b, c, d], 3).values[0]
    assert_same(floats(got), [a - c, d - b, a])


def test_lanes_below_are_counted():
    """v_mbcnt counts a mask's bits below its own lane, in the low and in the high half."""
    low, high, start = 0x9ABCDEF1, 0x12345679, 7
    text = f"""
        s_mov_b32 s10, {low:#x}
        s_mov_b32 s11, {high:#x}
        v_mbcnt_lo_u32_b32 v64, s10, {start}
        v_mbcnt_hi_u32_b32 v64, s11, v64
    """
    mask = low | high << 32
    below = [start + (mask & ((1 << lane) - 1)).bit_count() for lane in LANES.tolist()]
    assert_same(run(text).values[0, 0], below)


def test_products_and_moves_of_64_bits():
    a, b, low, high = drawn_bits(np.random.default_rng(1), 4)
    text = f"""
        v_mov_b32_e32 v66, 0
        v_mad_u64_u32 v[64:65], s[10:11], v8, v9, v[10:11]
        v_cndmask_b32_e64 v66, v66, 1, s[10:11]
        v_mad_u64_u32 v[67:68], s[10:11], v8, v9, 5
        {set_exec(MASK)}
        v_mov_b64_e32 v[67:68], v[10:11]
        {set_exec(ALL)}
        v_mov_b64_e32 v[69:70], -3
    """
    got = run(text, [a, b, low, high], 7).values[0].astype(object)
    product = a.astype(object) * b
    added = low.astype(object) + (high.astype(object) << 32)
    assert list(got[0] + (got[1] << 32) + (got[2] << 64)) == list(product + added)
    moved = np.where(lanes_of(MASK), added, (product + 5) % 2**64)
    assert list(got[3] + (got[4] << 32)) == list(moved)
    assert_same(got[5:].astype(np.int64), np.array([[2**32 - 3] * 64, [2**32 - 1] * 64]))


def test_comparison_that_sets_the_active_lanes():
    (a,) = drawn_bits(np.random.default_rng(2), 1)
    text = f"""
        v_mov_b32_e32 v64, 0
        {set_exec(MASK)}
        v_cmpx_le_u32_e64 exec, 100, v8
        v_mov_b32_e32 v64, 1
        {set_exec(ALL)}
    """
    assert_same(run(text, [a]).values[0, 0], (a >= 100) & lanes_of(MASK))


def test_sums_onto_the_destination_and_float64():
    a, b, c = np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32)
    text = f"""
        v_mov_b32_e32 v64, v10
        v_mov_b32_e32 v65, v10
        {set_exec(MASK)}
        v_fmac_f32_e32 v64, v8, v9
        {set_exec(ALL)}
        v_fmamk_f32 v65, v8, 0x40490fdb, v9
        v_cvt_f64_f32_e32 v[66:67], v8
        v_cvt_f64_f32_e32 v[12:13], v9
        v_cvt_f64_f32_e32 v[14:15], v10
        v_fmac_f64_e32 v[14:15], v[66:67], v[12:13]
        v_cvt_f32_f64_e32 v68, v[14:15]
        v_mov_b32_e32 v69, v14
        v_mov_b32_e32 v70, v15
    """
    got = run(text, [a, b, c], 7).values[0]
    exact = a.astype(np.float64) * b + c  # a product of 48 bits is exact
    assert_same(floats(got[0]), np.where(lanes_of(MASK), exact.astype(np.float32), c))
    pi = floats(np.array([0x40490FDB]))[0]
    assert_same(floats(got[1]), (a.astype(np.float64) * pi + b).astype(np.float32))
    assert_same(np.ascontiguousarray(got[2:4].T).view(np.float64)[:, 0], a.astype(np.float64))
    assert_same(np.ascontiguousarray(got[5:7].T).view(np.float64)[:, 0], exact)
    assert_same(floats(got[4]), exact.astype(np.float32))


_QUOTIENT = """
    v_div_scale_f32 v20, s[10:11], v9, v9, v8
    v_rcp_f32_e32 v21, v20
    v_div_scale_f32 v22, vcc, v8, v9, v8
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3
    v_fma_f32 v23, -v20, v21, 1.0
    v_fmac_f32_e32 v21, v23, v21
    v_mul_f32_e32 v23, v22, v21
    v_fma_f32 v24, -v20, v23, v22
    v_fmac_f32_e32 v23, v24, v21
    v_fma_f32 v20, -v20, v23, v22
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0
    v_div_fmas_f32 v20, v20, v21, v23
    v_div_fixup_f32 v64, v20, v9, v8
"""
"""v8 / v9 as compilers write it."""


def test_quotients_are_rounded_right():
    random = np.random.default_rng(4)
    a, b = (random.standard_normal((2, 64)) * 2.0 ** random.integers(-20, 20, (2, 64))).astype(
        np.float32
    )
    a[:6] = 1, 0, np.inf, -np.inf, np.nan, -2
    b[:9] = 0, 0, np.inf, 3, 1, -np.inf, 0, np.nan, np.inf
    with np.errstate(all="ignore"):
        assert_same(floats(run(_QUOTIENT, [a, b], flushes_denormals=True).values[0, 0]), a / b)
    with pytest.raises(Wrong, match="v_div_scale scales"):
        run(_QUOTIENT, [np.full(64, 1, np.float32), np.full(64, 1e38, np.float32)])


@pytest.mark.parametrize("flushes", [True, False])
def test_denormals_are_flushed_as_the_mode_says(flushes: bool):
    text = """
        v_add_f32_e32 v64, v8, v9
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3
        v_add_f32_e32 v65, v8, v9
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0
        v_add_f32_e32 v66, v8, v9
    """
    a, b = np.arange(64, dtype=np.uint32), np.full(64, 0x80000000, np.uint32)
    got = run(text, [a, b], 3, flushes_denormals=flushes).values[0]
    kept = bits_of(floats(a) + floats(b))
    for found, is_flushed in zip(got, (flushes, False, True), strict=True):
        assert_same(found, flushed(kept) if is_flushed else kept)
    with pytest.raises(NotImplementedError, match="HW_REG_MODE, 0, 2"):
        run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3")


def test_scalar_loads_and_buffers_of_more_widths():
    bits = np.random.default_rng(5).integers(0, 2**32, (4, 64), np.uint32)
    text = f"""
        s_and_b32 s11, s5, 0xffff
        s_mov_b32 s10, s4
        s_load_dwordx4 s[16:19], s[10:11], 0x10
        s_load_dwordx8 s[20:27], s[10:11], 0x100
        s_load_dwordx16 s[28:43], s[10:11], 0x200
        v_lshlrev_b32_e32 v4, 3, v0
        buffer_load_dwordx2 v[64:65], v4, s[4:7], 0 offen offset:512
        s_waitcnt vmcnt(0) lgkmcnt(0)
        v_mov_b32_e32 v66, s16
        v_mov_b32_e32 v67, s19
        v_mov_b32_e32 v68, s20
        v_mov_b32_e32 v69, s27
        v_mov_b32_e32 v70, s28
        v_mov_b32_e32 v71, s43
        {set_exec(MASK)}
        buffer_store_dwordx2 v[10:11], v4, s[4:7], 0 offen
        {set_exec(ALL)}
    """
    outcome = run(text, bits, 8)
    got, memory = outcome.values[0], outcome.memory.reshape(-1)
    pairs = bits[2:].reshape(64, 2).T
    assert_same(got[:2], pairs)
    assert_same(got[2:, 0], bits.reshape(-1)[[4, 7, 64, 71, 128, 143]])
    expected = np.where(lanes_of(MASK), bits[2:], bits[:2].reshape(64, 2).T)
    assert_same(memory[:128].reshape(64, 2).T, expected)


def test_lds_writes_of_two_dwords_and_lanes_that_fetch():
    """Offsets of the two count dwords; a lane that is off gives 0."""
    a, b = drawn_bits(np.random.default_rng(6), 2)
    text = f"""
        v_lshlrev_b32_e32 v4, 3, v0
        ds_write2_b32 v4, v8, v9 offset0:3 offset1:128
        ds_read_b32 v64, v4 offset:12
        ds_read_b32 v65, v4 offset:512
        v_mov_b32_e32 v66, 5
        {set_exec(MASK)}
        ds_bpermute_b32 v66, v4, v8 offset:4
        s_waitcnt lgkmcnt(0)
        {set_exec(ALL)}
    """
    got = run(text, [a, b], 3, schedule=Schedule("late")).values[0]
    assert_same(got[:2], [a, b])
    on, source = lanes_of(MASK), (2 * LANES + 1) % 64
    assert_same(got[2], np.where(on, np.where(on[source], a[source], 0), 5))


def test_lds_reads_of_two_places_and_writes_of_halves():
    """Both offsets count 64 numbers; half a dword stays as it is."""
    a, b, c = drawn_bits(np.random.default_rng(9), 3)
    text = f"""
        ds_write_b32 v3, v8 offset:256
        ds_write_b32 v3, v9 offset:512
        ds_read2st64_b32 v[64:65], v3 offset0:1 offset1:2
        v_lshlrev_b32_e32 v4, 2, v3
        ds_write_b64 v4, v[8:9] offset:1024
        ds_write_b64 v4, v[9:10] offset:2048
        ds_read2st64_b64 v[66:69], v4 offset0:2 offset1:4
        {set_exec(MASK)}
        ds_write_b16 v3, v10 offset:258
        {set_exec(ALL)}
        ds_read_b32 v70, v3 offset:256
        s_waitcnt lgkmcnt(0)
    """
    got = run(text, [a, b, c], 7, schedule=Schedule("late")).values[0]
    assert_same(got[:2], [a, b])
    half = 2048 // 16 - 1024 // 16  # lanes whose second place is another lane's first
    assert_same(got[2:4, :half], [a[:half], b[:half]])
    assert_same(got[4:6], [b, c])
    assert_same(got[6], np.where(lanes_of(MASK), a & 0xFFFF | c << 16, a))
    with pytest.raises(Wrong, match="odd LDS address"):
        run("ds_write_b16 v3, v8 offset:1", [a])
