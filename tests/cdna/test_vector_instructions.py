"""Vector instructions, each against its formula, for any bits and any EXEC mask."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tests.support.cdna.formulas import (
    RULES,
    Rule,
    bits_of,
    drawn_bits,
    drawn_floats,
    floats,
    flushed,
)  # fmt: skip
from tests.support.cdna.listings import LANES, lanes_of, run, set_exec
from tests.support.cdna.machine import Machine

ROUNDS = 6
MASKS = (2**64 - 1, 0x00F0_FFFF_1234_5678, 0)
BEFORE = 0x5A5A5A5A
"""The bits of a result's register before the instruction."""


def _operands(op: str, rule: Rule) -> np.ndarray:
    """Bits of every source in every round: [rounds, sources, lanes]."""
    random = np.random.default_rng(zlib.crc32(op.encode()))
    draw = drawn_floats if rule.is_float else drawn_bits
    drawn = draw(random, ROUNDS * rule.sources).reshape(ROUNDS, rule.sources, 64)
    if rule.sources > 1:  # equal numbers, for comparisons
        drawn[:, 1, ::7] = drawn[:, 0, ::7]
    return drawn


def _program(op: str, rule: Rule, mask: int) -> str:
    """The instruction in each round, whose result goes to v64 and further."""
    lines = [f"v_mov_b32_e32 v{64 + n}, {BEFORE:#x}" for n in range(ROUNDS)]
    for n in range(ROUNDS):
        sources = ", ".join(f"v{8 + n * rule.sources + x}" for x in range(rule.sources))
        lines.append(set_exec(mask))
        if rule.result == "mask":
            lines += [f"{op}{rule.suffix} s[10:11], {sources}", set_exec(2**64 - 1)]
            lines.append(f"v_mov_b32_e32 v4, 0\nv_cndmask_b32_e64 v{64 + n}, v4, 1, s[10:11]")
        else:
            lines.append(f"{op}{rule.suffix} v{64 + n}, {sources}")
    return "\n".join(lines)


def _expected(rule: Rule, sources: np.ndarray, flushes: bool) -> np.ndarray:
    """The formula's result: bits, or float64 of which any near number is right."""
    if not rule.is_float:
        return rule.formula(*sources)
    numbers = [floats(flushed(x) if flushes else x) for x in sources]
    with np.errstate(all="ignore"):
        found = rule.formula(*numbers)
    if rule.result != "float":
        return found
    return flushed(bits_of(found)) if flushes else bits_of(found)


def _assert_close(got: np.ndarray, expected: np.ndarray, result: str, flushes: bool) -> None:
    if result == "ulp":
        _assert_within_an_ulp(floats(got), expected, flushes)
    elif result == "float":
        nan = np.isnan(floats(expected))
        np.testing.assert_array_equal(np.isnan(floats(got)), nan)
        np.testing.assert_array_equal(got[~nan], expected[~nan])
    else:
        np.testing.assert_array_equal(got, expected)


def _assert_within_an_ulp(got: np.ndarray, expected: np.ndarray, flushes: bool) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        near = expected.astype(np.float32)
        if flushes:
            near = floats(flushed(bits_of(near)))
        close = np.abs(got - expected) <= np.abs(np.spacing(near))
    same = (got == near) | (np.isnan(got) & np.isnan(near))
    assert (same | close).all(), (got[~(same | close)], expected[~(same | close)])


def _same_nan(got: np.ndarray, op: str) -> np.ndarray:
    """Halves with the payload of NaN left out."""
    limit = 0x7F80 if "bf16" in op else 0x7C00
    halves = np.ascontiguousarray(got).view(np.uint16).copy()
    halves[halves & 0x7FFF > limit] = 0x7FFF
    return halves


@pytest.mark.parametrize("flushes", [True, False], ids=["flushed", "denormal"])
@pytest.mark.parametrize("op", RULES)
def test_instruction_computes_its_formula(op: str, flushes: bool, machine: Machine):
    rule, operands = RULES[op], _operands(op, RULES[op])
    for mask in MASKS:
        text, on = _program(op, rule, mask), lanes_of(mask)
        got = run(machine, text, operands, ROUNDS, flushes_denormals=flushes).values[0]
        for n in range(ROUNDS):
            if rule.result == "mask":
                np.testing.assert_array_equal(got[n][~on], 0)
            else:
                np.testing.assert_array_equal(got[n][~on], BEFORE)
            found, expected = got[n][on], _expected(rule, operands[n], flushes)[on]
            if rule.result == "halves":
                found, expected = _same_nan(found, op), _same_nan(expected, op)
            _assert_close(found, expected, rule.result, flushes)


def test_sources_are_registers_of_all_kinds_constants_and_changed_signs(machine: Machine):
    a, b, c = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    text = """
        v_readfirstlane_b32 s10, v8
        v_add_f32_e64 v64, -v8, |v9|
        v_fma_f32 v65, -|v8|, v9, -v10
        v_mul_f32_e32 v66, s10, v9
        v_mul_f32_e32 v67, 0x4f7ffffe, v9
        v_add_f32_e32 v68, -4.0, v9
        v_add_u32_e32 v69, -4, v9
        v_accvgpr_write_b32 a7, v8
        v_accvgpr_read_b32 v70, a7
        v_mov_b32_e32 v71, vcc_lo
        v_accvgpr_write_b32 a7, 0
        v_accvgpr_read_b32 v72, a7
    """
    got = run(machine, "s_mov_b32 vcc_lo, 77\n" + text, [a, b, c], 9).values[0]
    np.testing.assert_array_equal(floats(got[0]), np.abs(b) - a)
    fused = -np.abs(a).astype(np.float64) * b - c
    np.testing.assert_allclose(floats(got[1]), fused, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(floats(got[2]), a[0] * b)
    np.testing.assert_array_equal(floats(got[3]), floats(np.array([0x4F7FFFFE]))[0] * b)
    np.testing.assert_array_equal(floats(got[4]), b - np.float32(4))
    np.testing.assert_array_equal(got[5], b.view(np.uint32) - np.uint32(4))
    np.testing.assert_array_equal(got[6], a.view(np.uint32))
    np.testing.assert_array_equal(got[7], 77)
    np.testing.assert_array_equal(got[8], 0)


PACKED = {
    "v_pk_add_f32": (2, lambda a, b: a + b),
    "v_pk_mul_f32": (2, lambda a, b: a * b),
    "v_pk_fma_f32": (3, RULES["v_fma_f32"].formula),
}


@pytest.mark.parametrize("op", PACKED)
@pytest.mark.parametrize("low, high", [("000", "111"), ("101", "010"), ("010", "001")])
def test_packed_instruction_computes_two_numbers(op: str, low: str, high: str, machine: Machine):
    """op_sel chooses the register of each source for the first number, op_sel_hi for the second."""
    sources, formula = PACKED[op]
    operands = drawn_floats(np.random.default_rng(2), 6).reshape(3, 2, 64)[:sources]
    pairs = ", ".join(f"v[{8 + 2 * n}:{9 + 2 * n}]" for n in range(sources))
    chosen = [",".join(x[:sources]) for x in (low, high)]
    mask = MASKS[1]
    text = f"""
        v_mov_b32_e32 v64, {BEFORE:#x}
        v_mov_b32_e32 v65, {BEFORE:#x}
        {set_exec(mask)}
        {op} v[64:65], {pairs} op_sel:[{chosen[0]}] op_sel_hi:[{chosen[1]}]
    """
    got = run(machine, text, operands.reshape(-1, 64), 2, flushes_denormals=True).values[0]
    for part, selected in enumerate((low, high)):
        numbers = [floats(flushed(operands[n, int(selected[n])])) for n in range(sources)]
        with np.errstate(all="ignore"):
            expected = flushed(bits_of(formula(*numbers)))
        on = lanes_of(mask)
        _assert_close(got[part][on], expected[on], "float", True)
        np.testing.assert_array_equal(got[part][~on], BEFORE)


def test_packed_instruction_reads_its_sources_before_it_writes(machine: Machine):
    a, b = drawn_floats(np.random.default_rng(3), 2)
    text = """
        v_mov_b32_e32 v64, v8
        v_mov_b32_e32 v65, v9
        v_pk_add_f32 v[64:65], v[64:65], v[64:65] op_sel:[1,1] op_sel_hi:[0,0]
    """
    got = run(machine, text, [a, b], 2).values[0]
    with np.errstate(all="ignore"):
        _assert_close(got[0], bits_of(floats(b) + floats(b)), "float", False)
        _assert_close(got[1], bits_of(floats(a) + floats(a)), "float", False)


def test_choice_by_a_mask(machine: Machine):
    a, b = drawn_bits(np.random.default_rng(4), 2)
    text = """
        s_mov_b32 s10, 0x12345678
        s_mov_b32 s11, 0x9abcdef0
        v_cndmask_b32_e64 v64, v8, v9, s[10:11]
    """
    got = run(machine, text, [a, b]).values[0, 0]
    np.testing.assert_array_equal(got, np.where(lanes_of(0x9ABCDEF012345678), b, a))
    negated = run(machine, text.replace("v8, v9", "v8, -v9"), [a, b]).values[0, 0]
    chosen = np.where(lanes_of(0x9ABCDEF012345678), b ^ np.uint32(0x80000000), a)
    np.testing.assert_array_equal(negated, chosen)


def test_the_first_active_lane_becomes_scalar(machine: Machine):
    (a,) = drawn_bits(np.random.default_rng(5), 1)
    for mask, lane in ((2**64 - 1, 0), (0xFF000, 12), (1 << 63, 63), (0, 0)):
        everywhere = set_exec(2**64 - 1)
        text = (
            f"{set_exec(mask)}\nv_readfirstlane_b32 s10, v8\n{everywhere}\nv_mov_b32_e32 v64, s10"
        )
        np.testing.assert_array_equal(run(machine, text, [a]).values[0, 0], a[lane])


def test_lanes_of_a_quad_are_permuted(machine: Machine):
    """A lane whose source is inactive is not written."""
    a, b = drawn_floats(np.random.default_rng(6), 2)
    mask = 0xFFFF_FFFF_FFFF_FF5E
    text = f"""
        v_mov_b32_e32 v64, {BEFORE:#x}
        v_mov_b32_e32 v65, {BEFORE:#x}
        {set_exec(mask)}
        v_mov_b32_dpp v64, v8 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
        v_subrev_f32_dpp v65, v8, v9 quad_perm:[3,3,0,1] row_mask:0xf bank_mask:0xf
    """
    got = run(machine, text, [a, b], 2).values[0]
    on = lanes_of(mask)
    for n, quad in enumerate(((1, 0, 3, 2), (3, 3, 0, 1))):
        source = (LANES & ~3) | np.array(quad)[LANES & 3]
        with np.errstate(all="ignore"):
            moved = a[source] if n == 0 else bits_of(floats(b) - floats(a[source]))
        written = on & on[source]
        _assert_close(got[n][written], moved[written], "float", False)
        np.testing.assert_array_equal(got[n][~written], BEFORE)


@pytest.mark.parametrize("row", [16, 32])
def test_rows_of_lanes_are_swapped(row: int, machine: Machine):
    a, b = drawn_bits(np.random.default_rng(7), 2)
    swap = {16: "v_permlane16_swap_b32_e32", 32: "v_permlane32_swap_b32_e32"}[row]
    text = f"v_mov_b32_e32 v64, v8\nv_mov_b32_e32 v65, v9\n{swap} v64, v65"
    got = run(machine, text, [a, b], 2).values[0]
    odd = LANES // row % 2 == 1
    np.testing.assert_array_equal(got[0], np.where(odd, b[LANES - row], a))
    np.testing.assert_array_equal(got[1], np.where(odd, b, a[(LANES + row) % 64]))
