"""Instructions that CK's split-KV kernels use, and the other kernels that are run do not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cdna.formulas import bits_of, drawn_bits, drawn_floats, floats, flushed
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
NUMBERS = (0x12345678_9ABCDEF0, 0xFFFFFFFF, 0, ALL)
START = """
    v_cvt_f64_f32_e32 v[16:17], v8
    v_cvt_f64_f32_e32 v[18:19], v9
    v_cvt_f64_f32_e32 v[20:21], v10
"""
"""The first three inputs as float64."""


@pytest.mark.parametrize("a", NUMBERS)
def test_scalar_instructions_on_64_bits(a: int):
    for b in NUMBERS:
        start = f"{set_pair(10, a)}\n{set_pair(12, b)}\n{set_pair(14, 0)}"
        for op, result in (("or", a | b), ("xor", a ^ b)):
            found = pair_and_code(f"{start}\ns_{op}_b64 s[14:15], s[10:11], s[12:13]")
            assert found == (result, result != 0), op  # s_or_b64, s_xor_b64
        assert pair_and_code(f"{start}\ns_cmp_lg_u64 s[10:11], s[12:13]") == (0, a != b)
        low = ~a % 2**32
        assert pair_and_code(f"{start}\ns_not_b32 s14, s10") == (low, low != 0)


@pytest.mark.parametrize("a", NUMBERS)
def test_lanes_are_saved_and_replaced(a: int):
    for op, after in (("s_and_saveexec_b64", a & MASK), ("s_andn2_saveexec_b64", a & ~MASK)):
        text = f"{set_pair(10, a)}\n{set_exec(MASK)}\n{op} s[14:15], s[10:11]"
        replaced = f"s_mov_b64 s[12:13], exec\n{set_exec(ALL)}"
        assert pair_and_code(f"{text}\n{replaced}") == (MASK, after != 0)
        kept = f"{replaced}\ns_cmp_eq_u32 0, 1\ns_mov_b64 s[14:15], s[12:13]"
        assert pair_and_code(f"{text}\n{kept}") == (after, 0)


def test_address_of_the_next_instruction():
    """Constants are found from it, with an offset that is written in all its 32 bits."""
    first, _ = pair_and_code("s_getpc_b64 s[14:15]")
    start = 0x7FFF_FFFF_FFF0
    assert pair_and_code("s_getpc_b64 s[14:15]", start) == (start + first, 0)
    text = "s_getpc_b64 s[14:15]\ns_add_u32 s14, s14, 0xfffffff0"
    text += "\ns_addc_u32 s15, s15, lit(0xffffffff)"
    assert pair_and_code(text, start) == (start + first - 16, 1)


def _doubles(got: np.ndarray) -> np.ndarray:
    """The float64 numbers in pairs of registers."""
    pairs = got.reshape(-1, 2, 64).transpose(0, 2, 1)
    return np.ascontiguousarray(pairs).view(np.float64)[..., 0]


def test_float64():
    """Signs change the second register alone; a constant is a float32 number's."""
    a, b, c = np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32)
    text = f"""{START}
        v_add_f64 v[64:65], v[16:17], -v[18:19]
        v_mul_f64 v[66:67], |v[16:17]|, v[18:19]
        v_fma_f64 v[68:69], -v[16:17], v[18:19], v[20:21]
        v_fma_f64 v[70:71], v[16:17], v[18:19], 1.0
        v_rcp_f64_e32 v[72:73], v[18:19]
        v_mov_b32_e32 v74, v16
        v_mov_b32_e32 v75, v17
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2), 0
        {set_exec(MASK)}
        v_add_f64 v[74:75], v[16:17], v[18:19]
    """
    got = _doubles(run(text, [a, b, c], 12).values[0])
    x, y, z = (x.astype(np.float64) for x in (a, b, c))
    sums = np.where(lanes_of(MASK), x + y, x)  # products of two of them are exact
    assert_same(got, [x - y, abs(x) * y, z - x * y, x * y + 1, 1 / y, sums])
    with pytest.raises(NotImplementedError, match="HW_REG_MODE, 2, 2"):
        run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2), 1")


_QUOTIENT = f"""{START}
    v_div_scale_f64 v[22:23], s[10:11], v[18:19], v[18:19], v[16:17]
    v_rcp_f64_e32 v[24:25], v[22:23]
    v_fma_f64 v[26:27], -v[22:23], v[24:25], 1.0
    v_fmac_f64_e32 v[24:25], v[24:25], v[26:27]
    v_div_scale_f64 v[26:27], vcc, v[16:17], v[18:19], v[16:17]
    v_mul_f64 v[28:29], v[26:27], v[24:25]
    v_fma_f64 v[22:23], -v[22:23], v[28:29], v[26:27]
    v_div_fmas_f64 v[22:23], v[22:23], v[24:25], v[28:29]
    v_div_fixup_f64 v[64:65], v[22:23], v[18:19], v[16:17]
"""
"""The first input divided by the second, as compilers write it."""


def test_quotients_of_float64_are_rounded_right():
    random = np.random.default_rng(4)
    scales = 2.0 ** random.integers(-100, 100, (3, 64))
    a, b, c = (random.standard_normal((3, 64)) * scales).astype(np.float32)
    a[:6] = 1, 0, np.inf, -np.inf, np.nan, -2
    b[:9] = 0, 0, np.inf, 3, 1, -np.inf, 0, np.nan, np.inf
    (got,) = _doubles(run(_QUOTIENT, [a, b, c], 2).values[0])
    with np.errstate(all="ignore"):
        assert_same(got, a.astype(np.float64) / b)


@pytest.mark.parametrize("flushes", [True, False])
def test_powers_of_two_as_factors(flushes: bool):
    random = np.random.default_rng(5)
    (x,) = drawn_floats(random, 1)
    exponent = np.where(random.integers(0, 2, 64), random.integers(-200, 200, 64), 3)
    exponent[:3] = 5000, -5000, 2**31 - 1
    given = [x, exponent.astype(np.int32).view(np.uint32)]
    got = run("v_ldexp_f32 v64, v8, v9", given, flushes_denormals=flushes).values[0, 0]
    with np.errstate(all="ignore"):
        expected = bits_of(np.ldexp(floats(flushed(x) if flushes else x), exponent))
    expected = flushed(expected) if flushes else expected
    nan = np.isnan(floats(expected))
    assert_same(np.isnan(floats(got)), nan)
    assert_same(got[~nan], expected[~nan])


def test_lds_reads_of_two_places_side_by_side():
    """Both offsets count numbers, not bytes."""
    a, b = drawn_bits(np.random.default_rng(6), 2)
    text = """
        ds_write_b32 v3, v8
        ds_write_b32 v3, v9 offset:256
        ds_read2_b32 v[64:65], v3 offset0:3 offset1:64
        ds_read2_b64 v[66:69], v3 offset0:2 offset1:5
        s_waitcnt lgkmcnt(0)
    """
    got = run(text, [a, b], 6, schedule=Schedule("late")).values[0]
    both = np.concatenate([a, b])
    for register, place in zip(got, (3, 64, 4, 5, 10, 11), strict=True):
        assert_same(register[:50], both[place : place + 50])


def test_loads_with_a_scalar_base():
    (bits,) = drawn_bits(np.random.default_rng(7), 1)
    text = f"""
        s_and_b32 s11, s5, 0xffff
        s_mov_b32 s10, s4
        v_and_b32_e32 v4, 0x7f, v3
        v_mov_b32_e32 v64, 7
        {set_exec(MASK)}
        global_load_dword v64, v4, s[10:11] offset:16
        s_waitcnt vmcnt(0)
        {set_exec(ALL)}
    """
    got = run(text, [bits], schedule=Schedule("late")).values[0, 0]
    assert_same(got, np.where(lanes_of(MASK), bits[LANES % 32 + 4], 7))


def test_stores_of_halves():
    """Half a dword stays as it is where the other lane is off, and so does what is out of range."""
    bits = np.random.default_rng(8).integers(0, 2**32, (2, 64), np.uint32)
    text = f"""
        v_lshlrev_b32_e32 v4, 1, v0
        s_mov_b32 s6, 0x40
        {set_exec(MASK)}
        buffer_store_short v9, v4, s[4:7], 0 offen
        s_waitcnt vmcnt(0)
        {set_exec(ALL)}
    """
    halves = run(text, bits).memory[0].view(np.uint16)
    before = bits[0].view(np.uint16)
    stored = np.where(lanes_of(MASK) & (LANES < 32), bits[1] & 0xFFFF, before[:64])
    assert_same(halves, [*stored, *before[64:]])
    with pytest.raises(Wrong, match="odd address"):
        run("v_mov_b32_e32 v4, 1\nbuffer_store_short v9, v4, s[4:7], 0 offen", bits)
