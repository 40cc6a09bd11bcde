"""Scalar instructions, each against its formula, and the condition code that it leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.cdna.listings import assert_same, run

_EDGES = (0, 1, 2, 31, 32, 33, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
ROUNDS = 24


def _signed(x: int, bits: int = 32) -> int:
    return (x & (1 << bits) - 1) - ((x >> bits - 1 & 1) << bits)


def _overflows(x: int) -> bool:
    return not -(2**31) <= x < 2**31


Arithmetic = Callable[[int, int, bool], tuple[int, bool]]
"""The result, of which 32 bits are kept, and the condition code, of two numbers and the code."""


def _not_zero(formula: Callable[[int, int], int]) -> Arithmetic:
    return lambda a, b, scc: (formula(a, b), formula(a, b) & 0xFFFFFFFF != 0)


ARITHMETIC: dict[str, Arithmetic] = {
    "s_add_u32": lambda a, b, scc: (a + b, a + b >= 2**32),
    "s_addc_u32": lambda a, b, scc: (a + b + scc, a + b + scc >= 2**32),
    "s_sub_u32": lambda a, b, scc: (a - b, b > a),
    "s_subb_u32": lambda a, b, scc: (a - b - scc, b + scc > a),
    "s_mul_hi_u32": lambda a, b, scc: (a * b >> 32, scc),
    "s_mul_hi_i32": lambda a, b, scc: (_signed(a) * _signed(b) >> 32, scc),
    "s_max_i32": lambda a, b, scc: (max(a, b, key=_signed), _signed(a) >= _signed(b)),
    "s_min_i32": lambda a, b, scc: (min(a, b, key=_signed), _signed(a) < _signed(b)),
    "s_andn2_b32": _not_zero(lambda a, b: a & ~b),
    "s_add_i32": lambda a, b, scc: (a + b, _overflows(_signed(a) + _signed(b))),
    "s_sub_i32": lambda a, b, scc: (a - b, _overflows(_signed(a) - _signed(b))),
    "s_mul_i32": lambda a, b, scc: (a * b, scc),
    "s_and_b32": _not_zero(lambda a, b: a & b),
    "s_or_b32": _not_zero(lambda a, b: a | b),
    "s_xor_b32": _not_zero(lambda a, b: a ^ b),
    "s_lshl_b32": _not_zero(lambda a, b: a << (b & 31)),
    "s_lshr_b32": _not_zero(lambda a, b: a >> (b & 31)),
    "s_ashr_i32": _not_zero(lambda a, b: _signed(a) >> (b & 31)),
    "s_cselect_b32": lambda a, b, scc: (a if scc else b, scc),
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "s_cmp_eq_i32": lambda a, b: a == b,
    "s_cmp_lt_i32": lambda a, b: _signed(a) < _signed(b),
    "s_cmp_le_i32": lambda a, b: _signed(a) <= _signed(b),
    "s_cmp_gt_i32": lambda a, b: _signed(a) > _signed(b),
    "s_cmp_ge_i32": lambda a, b: _signed(a) >= _signed(b),
    "s_cmp_eq_u32": lambda a, b: a == b,
    "s_cmp_lg_u32": lambda a, b: a != b,
    "s_cmp_gt_u32": lambda a, b: a > b,
    "s_cmp_lt_u32": lambda a, b: a < b,
    "s_cmp_le_u32": lambda a, b: a <= b,
    "s_cmp_ge_u32": lambda a, b: a >= b,
}


def _pairs() -> list[tuple[int, int]]:
    """Numbers of any bits and of edges, and equal ones."""
    random = np.random.default_rng(3)
    drawn = [int(x) for x in random.integers(0, 2**32, 2 * ROUNDS)]
    mixed = [x if random.integers(2) else int(random.choice(_EDGES)) for x in drawn]
    pairs = list(zip(mixed[::2], mixed[1::2], strict=True))
    return [(a, a) if n % 6 == 0 else (a, b) for n, (a, b) in enumerate(pairs)]


def _set_scc(scc: bool) -> str:
    return f"s_cmp_eq_u32 {int(scc)}, 1"


def _store(n: int, *registers: str) -> list[str]:
    return [f"v_mov_b32_e32 v{64 + len(registers) * n + m}, {x}" for m, x in enumerate(registers)]


_KEEP_SCC = "s_cselect_b32 s13, 1, 0"


@pytest.mark.parametrize("scc", [False, True])
@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic(op: str, scc: bool):
    lines = []
    for n, (a, b) in enumerate(_pairs()):
        lines += [f"s_mov_b32 s10, {a:#x}", f"s_mov_b32 s11, {b:#x}", _set_scc(scc)]
        lines += [f"{op} s12, s10, s11", _KEEP_SCC, *_store(n, "s12", "s13")]
    got = run("\n".join(lines), results=2 * ROUNDS).values[0, :, 0]
    expected = [ARITHMETIC[op](a, b, scc) for a, b in _pairs()]
    assert_same(got[::2], [x & 0xFFFFFFFF for x, _ in expected])
    assert_same(got[1::2], [int(code) for _, code in expected])


@pytest.mark.parametrize("op", COMPARISONS)
def test_comparison(op: str):
    lines = []
    for n, (a, b) in enumerate(_pairs()):
        lines += [f"s_mov_b32 s10, {a:#x}", f"{op} s10, {b:#x}", _KEEP_SCC, *_store(n, "s13")]
    got = run("\n".join(lines), results=ROUNDS).values[0, :, 0]
    assert_same(got, [int(COMPARISONS[op](a, b)) for a, b in _pairs()])


def test_adding_a_constant_of_16_bits():
    """s_addk_i32 extends the constant's sign, and SCC is the overflow."""
    lines = []
    for n, (a, b) in enumerate(_pairs()):
        lines += [f"s_mov_b32 s12, {a:#x}", f"s_addk_i32 s12, {b & 0xFFFF:#x}", _KEEP_SCC]
        lines += _store(n, "s12", "s13")
    got = run("\n".join(lines), results=2 * ROUNDS).values[0, :, 0]
    sums = [_signed(a) + _signed(b, 16) for a, b in _pairs()]
    assert_same(got[::2], [x & 0xFFFFFFFF for x in sums])
    assert_same(got[1::2], [_overflows(x) for x in sums])


def test_moves_of_32_and_64_bits():
    text = """
        s_mov_b32 s10, 0x12345678
        s_mov_b32 s11, -5
        s_mov_b64 s[12:13], s[10:11]
        s_mov_b64 s[14:15], -7
        v_mov_b32_e32 v64, s12
        v_mov_b32_e32 v65, s13
        v_mov_b32_e32 v66, s14
        v_mov_b32_e32 v67, s15
    """
    got = run(text, results=4).values[0, :, 0]
    assert_same(got, np.array([0x12345678, -5, -7, -1]).astype(np.uint32))


@pytest.mark.parametrize("scc", [False, True])
def test_branches(scc: bool):
    """A distance counts words of four bytes from the next instruction; it may be negative."""
    text = f"""
        v_mov_b32_e32 v64, 0
        v_mov_b32_e32 v65, 0
        v_mov_b32_e32 v66, 0
        {_set_scc(scc)}
        s_cbranch_scc0 1
        v_mov_b32_e32 v64, 1
        s_cbranch_scc1 1
        v_mov_b32_e32 v65, 1
        s_branch 2
        v_add_u32_e32 v66, 10, v66
        s_branch 2
        v_add_u32_e32 v66, 1, v66
        s_branch {0x10000 - 4}
        s_nop 0
    """
    got = run(text, results=3).values[0, :, 0]
    assert_same(got, [int(scc), int(not scc), 11])


def test_instructions_without_effect_on_numbers():
    text = "v_mov_b32_e32 v64, 7\ns_nop 3\ns_setprio 1\nv_nop\ns_barrier"
    assert_same(run(text).values, 7)


def test_scalar_loads():
    """An offset is a constant or a register; several loads may land in any order."""
    values = np.arange(1000, 1064, dtype=np.uint32)
    text = """
        s_mov_b32 s20, 8
        s_and_b32 s5, s5, 0xffff
        s_load_dword s10, s[4:5], 0xc
        s_load_dwordx2 s[12:13], s[4:5], 0x20
        s_load_dword s14, s[4:5], s20
        s_waitcnt lgkmcnt(0)
        v_mov_b32_e32 v64, s10
        v_mov_b32_e32 v65, s12
        v_mov_b32_e32 v66, s13
        v_mov_b32_e32 v67, s14
    """
    got = run(text, [values], 4).values[0, :, 0]
    assert_same(got, [1003, 1008, 1009, 1002])
