"""What vector instructions compute in a lane, as the instruction set's documents say, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

Bits = np.ndarray
"""uint32 [lanes]."""
Formula = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Rule:
    """One instruction: what it computes, from sources of which kind."""

    formula: Formula
    sources: int
    is_float: bool = False
    suffix: str = "_e32"
    result: str = "bits"
    """bits, mask, or what is compared more loosely: float (any NaN is right), halves, ulp."""
    flushes_sources: bool = True


def floats(bits: Bits) -> np.ndarray:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def bits_of(numbers: np.ndarray) -> Bits:
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32)


def flushed(bits: Bits) -> Bits:
    """Denormal numbers as zeros of their sign."""
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).astype(np.uint32)


def _wide(formula: Callable[..., np.ndarray]) -> Formula:
    """Of whole numbers without a limit: the low 32 bits."""

    def computed(*sources: Bits) -> Bits:
        whole = formula(*(x.astype(object) for x in sources))
        return np.array([int(x) & 0xFFFFFFFF for x in whole], np.uint32)

    return computed


def _signed(x: np.ndarray, bits: int = 32) -> np.ndarray:
    low = x & ((1 << bits) - 1)
    return low - ((low >> (bits - 1)) << bits)


def _permuted(high: Bits, low: Bits, selectors: Bits) -> Bits:
    def byte(selector: int, word: int) -> int:
        if selector < 8:
            return word >> 8 * selector & 255
        if selector < 12:
            return 255 * (word >> 16 * (selector - 8) + 15 & 1)
        return 0 if selector == 12 else 255

    words = (high.astype(object) << 32) | low.astype(object)
    return np.array([
        sum(byte(int(selector) >> 8 * n & 255, int(word)) << 8 * n for n in range(4))
        for selector, word in zip(selectors, words, strict=True)
    ], np.uint32)  # fmt: skip


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c with one rounding: exactly, or by float64 where something is not finite or zero."""
    with np.errstate(all="ignore"):
        simple = (a.astype(np.float64) * b + c).astype(np.float32)
    exact = [
        _nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        if np.isfinite([x, y, z]).all() and simple[n] != 0
        else simple[n]
        for n, (x, y, z) in enumerate(zip(a, b, c, strict=True))
    ]
    return np.array(exact, np.float32)


def _nearest(x: Fraction) -> np.float32:
    """The nearest float32: of float64 rounded to odd, whose last bit keeps what was cut off."""
    near = np.float64(float(x))
    if Fraction(float(near)) != x and not near.view(np.uint64) & np.uint64(1):
        near = np.nextafter(near, np.inf if x > Fraction(float(near)) else -np.inf)
    with np.errstate(over="ignore", under="ignore"):
        return near.astype(np.float32)


def _signed_field(x: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    def field(x: int, start: int, size: int) -> int:
        low = (x >> (start & 31)) % 2 ** (size & 31)
        return low - (low >> max((size & 31) - 1, 0) << (size & 31))

    return np.array([field(*x) for x in zip(x, start, size, strict=True)], object)


def _reversed(x: Bits) -> Bits:
    return np.array([int(f"{int(n):032b}"[::-1], 2) for n in x], np.uint32)


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of a number and NaN the number; of zeros the positive one."""
    zero = np.where(np.signbit(a), b, a)
    return np.where((a == 0) & (b == 0), zero, np.fmax(a, b))


def _to_f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def _to_zero_f16(x: np.ndarray) -> np.ndarray:
    near = _to_f16(x)
    away = np.abs(near.astype(np.float32)) > np.abs(x)
    return (near.view(np.uint16) - away.astype(np.uint16)).view(np.float16)


def _halves(low: np.ndarray, high: np.ndarray) -> Bits:
    return low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << 16


def _converted(convert: Callable[[np.ndarray], np.ndarray]) -> Formula:
    return lambda a, b: _halves(convert(a), convert(b))


def _to_u32(x: np.ndarray) -> Bits:
    return np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), 0, 2**32 - 1)).astype(np.uint32)


def _to_i32(x: np.ndarray) -> Bits:
    whole = np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), -(2**31), 2**31 - 1))
    return whole.astype(np.int32).view(np.uint32)


def _e64(formula: Formula, sources: int) -> Rule:
    return Rule(formula, sources, suffix="")


def _f32(formula: Formula, sources: int, suffix: str = "_e32", result: str = "float") -> Rule:
    return Rule(formula, sources, True, suffix, result)


def _f32_of_half(half: type) -> Rule:
    """The low half, as a float32 number."""

    def computed(a: np.ndarray) -> np.ndarray:
        low = (a.view(np.uint32) & 0xFFFF).astype(np.uint16).view(half)
        return low.astype(np.float32)

    return Rule(computed, 1, True, "_e32", "float", False)


def _mask(formula: Formula, is_float: bool = False) -> Rule:
    return Rule(formula, 2, is_float, "_e64", "mask")


def _int32(formula: Formula) -> Formula:
    return lambda a, b: formula(a.view(np.int32), b.view(np.int32))


RULES = {
    "v_mov_b32": Rule(lambda a: a, 1),
    "v_add_u32": Rule(_wide(lambda a, b: a + b), 2),
    "v_add_i32": _e64(_wide(lambda a, b: a + b), 2),
    "v_sub_u32": Rule(_wide(lambda a, b: a - b), 2),
    "v_sub_i32": _e64(_wide(lambda a, b: a - b), 2),
    "v_subrev_u32": Rule(_wide(lambda a, b: b - a), 2),
    "v_add3_u32": _e64(_wide(lambda a, b, c: a + b + c), 3),
    "v_mul_i32_i24": Rule(_wide(lambda a, b: _signed(a, 24) * _signed(b, 24)), 2),
    "v_mul_lo_u32": _e64(_wide(lambda a, b: a * b), 2),
    "v_mul_hi_u32": _e64(_wide(lambda a, b: a * b >> 32), 2),
    "v_and_b32": Rule(lambda a, b: a & b, 2),
    "v_or_b32": Rule(lambda a, b: a | b, 2),
    "v_or3_b32": _e64(lambda a, b, c: a | b | c, 3),
    "v_ashrrev_i32": Rule(_wide(lambda a, b: _signed(b) >> (a & 31)), 2),
    "v_ashrrev_i16": Rule(_wide(lambda a, b: (_signed(b, 16) >> (a & 15)) % 2**16), 2),
    "v_lshrrev_b16": Rule(_wide(lambda a, b: b % 2**16 >> (a & 15)), 2),
    "v_add_u16": Rule(_wide(lambda a, b: (a + b) % 2**16), 2),
    "v_sub_u16": Rule(_wide(lambda a, b: (a - b) % 2**16), 2),
    "v_bfrev_b32": Rule(_reversed, 1),
    "v_bfe_i32": _e64(_wide(_signed_field), 3),
    "v_mul_u32_u24": Rule(_wide(lambda a, b: (a % 2**24) * (b % 2**24)), 2),
    "v_mad_u32_u24": _e64(_wide(lambda a, b, c: (a % 2**24) * (b % 2**24) + c), 3),
    "v_mad_i32_i24": _e64(_wide(lambda a, b, c: _signed(a, 24) * _signed(b, 24) + c), 3),
    "v_lshl_add_u32": _e64(_wide(lambda a, b, c: (a << (b & 31)) + c), 3),
    "v_add_lshl_u32": _e64(_wide(lambda a, b, c: (a + b) << (c & 31)), 3),
    "v_lshl_or_b32": _e64(_wide(lambda a, b, c: (a << (b & 31)) | c), 3),
    "v_xor_b32": Rule(lambda a, b: a ^ b, 2),
    "v_and_or_b32": _e64(lambda a, b, c: (a & b) | c, 3),
    "v_lshlrev_b32": Rule(_wide(lambda a, b: b << (a & 31)), 2),
    "v_lshrrev_b32": Rule(_wide(lambda a, b: b >> (a & 31)), 2),
    "v_bfe_u32": _e64(_wide(lambda a, b, c: (a >> (b & 31)) % 2 ** (c & 31)), 3),
    "v_perm_b32": _e64(_permuted, 3),
    "v_add_f32": _f32(lambda a, b: a + b, 2),
    "v_sub_f32": _f32(lambda a, b: a - b, 2),
    "v_subrev_f32": _f32(lambda a, b: b - a, 2),
    "v_mul_f32": _f32(lambda a, b: a * b, 2),
    "v_fma_f32": _f32(_fused, 3, ""),
    "v_max_f32": _f32(_larger, 2),
    "v_max3_f32": _f32(lambda a, b, c: _larger(_larger(a, b), c), 3, ""),
    "v_exp_f32": _f32(lambda a: np.exp2(a.astype(np.float64)), 1, result="ulp"),
    "v_log_f32": _f32(lambda a: np.log2(a.astype(np.float64)), 1, result="ulp"),
    "v_rcp_f32": _f32(lambda a: 1 / a.astype(np.float64), 1, result="ulp"),
    "v_rcp_iflag_f32": _f32(lambda a: 1 / a.astype(np.float64), 1, result="ulp"),
    "v_cvt_f32_u32": Rule(lambda a: bits_of(a.astype(np.float32)), 1),
    "v_cvt_u32_f32": Rule(_to_u32, 1, True),
    "v_cvt_i32_f32": Rule(_to_i32, 1, True),
    "v_trunc_f32": _f32(np.trunc, 1),
    "v_rndne_f32": _f32(np.rint, 1),
    "v_cvt_pkrtz_f16_f32": _f32(_converted(_to_zero_f16), 2, "", "halves"),
    "v_cvt_pk_f16_f32": _f32(_converted(_to_f16), 2, "", "halves"),
    "v_cvt_pk_bf16_f32": _f32(_converted(lambda x: x.astype(jnp.bfloat16)), 2, "", "halves"),
    "v_cvt_f32_f16": _f32_of_half(np.float16),
    "v_cvt_f32_bf16": _f32_of_half(jnp.bfloat16),
    "v_cmp_lt_f32": _mask(lambda a, b: a < b, True),
    "v_cmp_ge_f32": _mask(lambda a, b: a >= b, True),
    "v_cmp_ngt_f32": _mask(lambda a, b: ~(a > b), True),
    "v_cmp_nlt_f32": _mask(lambda a, b: ~(a < b), True),
    "v_cmp_neq_f32": _mask(lambda a, b: a != b, True),
    "v_cmp_eq_f32": _mask(lambda a, b: a == b, True),
    "v_cmp_u_f32": _mask(lambda a, b: np.isnan(a) | np.isnan(b), True),
    "v_cmp_eq_u32": _mask(lambda a, b: a == b),
    "v_cmp_ne_u32": _mask(lambda a, b: a != b),
    "v_cmp_lt_u32": _mask(lambda a, b: a < b),
    "v_cmp_le_u32": _mask(lambda a, b: a <= b),
    "v_cmp_lt_i32": _mask(_int32(lambda a, b: a < b)),
    "v_cmp_le_i32": _mask(_int32(lambda a, b: a <= b)),
    "v_cmp_gt_i32": _mask(_int32(lambda a, b: a > b)),
    "v_cmp_ge_i32": _mask(_int32(lambda a, b: a >= b)),
}
"""Instructions that compute one register of each lane from the same lane."""

_EDGES = (0, 1, 2, 15, 31, 32, 33, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_SPECIAL = (
    0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x807FFFFF, 0x800000, 0x80800000, 0x7F7FFFFF,
    0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x3F800000, 0xBF800000, 0x4F800000,
    0x4F7FFFFF,
    # Around float16's and bfloat16's ties and limits.
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000,
    0x387FE000, 0x38800000, 0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000, 0x3F808001,
)  # fmt: skip


def drawn_bits(random: np.random.Generator, rounds: int) -> np.ndarray:
    """Whole numbers [rounds, lanes]: any bits, and edges."""
    drawn = random.integers(0, 2**32, (rounds, 64), np.uint32)
    return np.where(
        random.integers(0, 2, drawn.shape), drawn, random.choice(_EDGES, drawn.shape)
    ).astype(np.uint32)


def drawn_floats(random: np.random.Generator, rounds: int) -> np.ndarray:
    """Bits of float32 numbers [rounds, lanes]: special ones, usual ones, any."""
    shape = (rounds, 64)
    usual = bits_of(random.standard_normal(shape) * 2.0 ** random.integers(-20, 20, shape))
    any_bits = random.integers(0, 2**32, shape, np.uint32)
    chosen = random.choice(3, shape)
    special = random.choice(_SPECIAL, shape)
    return np.choose(chosen, (special, usual, any_bits)).astype(np.uint32)
