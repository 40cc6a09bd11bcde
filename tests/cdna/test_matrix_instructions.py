"""Matrix instructions: which lane and register holds which number, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cdna.listings import LANES, run, set_exec
from tests.support.cdna.machine import Machine

SHAPES = {
    "v_mfma_f32_32x32x8_bf16": (32, 8),
    "v_mfma_f32_16x16x16_bf16": (16, 16),
    "v_mfma_f32_16x16x16_f16": (16, 16),
    "v_mfma_f32_32x32x16_bf16": (32, 16),
    "v_mfma_f32_32x32x16_f16": (32, 16),
    "v_mfma_f32_16x16x32_bf16": (16, 32),
    "v_mfma_f32_16x16x32_f16": (16, 32),
}
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


@dataclass(frozen=True)
class Product:
    """An instruction's sources A [rows, depth], B [depth, rows] and C [rows, rows]."""

    op: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    @staticmethod
    def drawn(op: str, draw: Draw) -> Product:
        random, (rows, depth) = np.random.default_rng(1), SHAPES[op]
        half = jnp.bfloat16 if op.endswith("bf16") else np.float16
        with np.errstate(over="ignore"):
            a, b = (draw(random, x).astype(half) for x in ((rows, depth), (depth, rows)))
        return Product(op, a, b, draw(random, (rows, rows)).astype(np.float32))

    @property
    def groups(self) -> int:
        return 64 // len(self.a)

    def source(self, matrix: np.ndarray) -> np.ndarray:
        """Registers of A, or of B transposed: lane l has row l % rows, two numbers in each."""
        rows, depth = matrix.shape
        per_lane = depth // self.groups
        columns = per_lane * (LANES[:, None] // rows) + np.arange(per_lane)
        by_lane = np.ascontiguousarray(matrix[LANES[:, None] % rows, columns])
        return by_lane.view(np.uint32).T

    def place(self, register: int) -> tuple[np.ndarray, np.ndarray]:
        """The row and the column of C and D that each lane has in a register."""
        rows = len(self.a)
        row = 4 * self.groups * (register // 4) + 4 * (LANES // rows) + register % 4
        return row, LANES % rows

    @property
    def registers(self) -> int:
        return len(self.c) ** 2 // 64

    def expected(self) -> np.ndarray:
        """A·B + C in float64, as registers."""
        with np.errstate(all="ignore"):
            d = self.a.astype(np.float64) @ self.b.astype(np.float64) + self.c
        return np.stack([d[self.place(r)] for r in range(self.registers)])

    def run(
        self, machine: Machine, *, file: str = "v", c: str = "", before: str = "", result: int = 128
    ) -> np.ndarray:
        """The result. `file`: of the sources, v or a; `c`: in place of C's registers; `result`: the
        first register that is written."""
        a, b = self.source(self.a), self.source(self.b.T)
        start = np.stack([self.c[self.place(r)] for r in range(self.registers)])
        inputs = np.concatenate([a, b, start.view(np.uint32)])
        first_b, first_c, end = 8 + len(a), 8 + 2 * len(a), 8 + len(inputs)
        sources = f"{file}[8:{first_b - 1}], {file}[{first_b}:{first_c - 1}]"
        text = "\n".join([
            *(f"v_accvgpr_write_b32 a{n}, v{n}" for n in range(8, end)),
            before,
            f"{self.op} v[{result}:{result + self.registers - 1}], {sources}, "
            + (c or f"{file}[{first_c}:{end - 1}]"),
            set_exec(2**64 - 1),
            *(f"v_mov_b32_e32 v{64 + n}, v{result + n}" for n in range(self.registers)),
        ])  # fmt: skip
        return run(machine, text, inputs, self.registers).values[0].view(np.float32)


def _whole(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Numbers whose products and sums are exact."""
    return random.integers(-8, 9, shape).astype(np.float64)


def _normal(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return random.standard_normal(shape)


@pytest.mark.parametrize("file", "va")
@pytest.mark.parametrize("op", SHAPES)
def test_every_number_is_in_its_lane_and_register(op: str, file: str, machine: Machine):
    product = Product.drawn(op, _whole)
    np.testing.assert_array_equal(product.run(machine, file=file), product.expected())


@pytest.mark.parametrize("op", SHAPES)
def test_sums_are_of_float32(op: str, machine: Machine):
    product = Product.drawn(op, _normal)
    np.testing.assert_allclose(product.run(machine), product.expected(), atol=1e-5)


@pytest.mark.parametrize("op", SHAPES)
def test_exec_is_ignored_and_c_may_be_zero(op: str, machine: Machine):
    product = Product.drawn(op, _whole)
    got = product.run(machine, c="0", before=set_exec(0xF0))
    without = Product(op, product.a, product.b, 0 * product.c)
    np.testing.assert_array_equal(got, without.expected())


@pytest.mark.parametrize("op", SHAPES)
def test_denormal_numbers_count(op: str, machine: Machine):
    """The MODE register's flushing does not apply to matrix instructions."""
    smallest = 2.0**-24 if op.endswith("_f16") else 2.0**-133
    product = Product.drawn(op, lambda random, shape: smallest * _whole(random, shape))
    ones = Product(op, product.a, (0 * product.b + 1).astype(product.b.dtype), 0 * product.c)
    assert np.any(ones.expected())
    np.testing.assert_array_equal(ones.run(machine), ones.expected().astype(np.float32))


@pytest.mark.parametrize("op", SHAPES)
def test_infinities_and_nan_reach_their_rows_and_columns(op: str, machine: Machine):
    product = Product.drawn(op, _whole)
    product.a[3, 2], product.b[5, 7], product.c[1, 4] = np.inf, np.nan, -np.inf
    np.testing.assert_array_equal(product.run(machine), product.expected())


@pytest.mark.parametrize("op", SHAPES)
def test_result_may_replace_its_sources(op: str, machine: Machine):
    """All sources are read before anything is written."""
    product = Product.drawn(op, _whole)
    np.testing.assert_array_equal(product.run(machine, result=8), product.expected())
