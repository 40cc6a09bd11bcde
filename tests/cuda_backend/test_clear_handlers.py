"""The custom calls that clear rows, under JAX on this CPU over a driver that is not real."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.clear_rows import cleared_together, ends_cleared
from attn_dispatch.semantics.row_flags import INVALID, PADDING, REAL, cleared_by_xla
from tests.support.compiled import needs_compiler
from tests.support.fa4_emulated import Emulated, emulated

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def native(monkeypatch) -> Emulated:
    found = emulated()
    monkeypatch.setattr(clear_rows, "_native", lambda: found.module)
    return found


def numbers(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.arange(1, 1 + np.prod(shape)).reshape(shape).astype(dtype)


def assert_equal(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_rows_are_cleared_by_their_flags():
    """In more blocks than one, and with more rows in one array than in the other."""
    flags = jnp.asarray([PADDING, REAL, INVALID, REAL] * 20, jnp.uint8)
    pairs = (numbers(80, 2, 8, dtype="bfloat16"), flags), (numbers(3, 4), flags[:3])
    expected = [cleared_by_xla(x, y) for x, y in pairs]
    assert_equal(jax.jit(cleared_together)(*pairs), expected)


def test_rows_in_another_buffer_are_copied_first():
    x, flags = numbers(4, 8), jnp.asarray([REAL, PADDING, INVALID, REAL], jnp.uint8)
    call = jax.ffi.ffi_call(clear_rows.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert_equal([jax.jit(call)(x, flags)], [cleared_by_xla(x, flags)])


@pytest.mark.parametrize("invalid_is_nan", [False, True])
@pytest.mark.parametrize("offsets", [(0, 3, 7), (0, 10), (0, 0), (10, 10, 10), (0, 99), (99, -1)])
def test_ends_are_cleared_by_the_offsets(offsets: tuple[int, ...], invalid_is_nan: bool):
    given = jnp.asarray(offsets, jnp.int32)
    arrays, lse = [numbers(10, 2, 8, dtype="bfloat16"), numbers(10, 1)], numbers(3, 10)
    expected = clear_rows._ends_cleared_by_xla(given, arrays, lse, invalid_is_nan=invalid_is_nan)
    call = jax.jit(lambda *x: ends_cleared(*x, invalid_is_nan=invalid_is_nan))
    assert_equal(call(given, arrays, lse), expected)


def test_arrays_without_rows_are_left():
    nothing, flags = jnp.zeros((0, 8)), jnp.zeros((0,), jnp.uint8)
    assert cleared_together((nothing, flags))[0].shape == (0, 8)
    offsets = jnp.zeros(2, jnp.int32)
    lse = jnp.zeros((3, 0))
    assert ends_cleared(offsets, [nothing], lse, invalid_is_nan=True)[1].shape == (3, 0)


ROWS, FLAGS = jnp.zeros((4, 8)), jnp.zeros(4, jnp.uint8)


@pytest.mark.parametrize(
    ("message", "operands", "number"),
    [
        ("expected 1 to 4 arrays with flags for each, got 1 operands and 1 results", [ROWS], 1),
        ("expected 1 to 4 arrays with flags", [ROWS] * 5 + [FLAGS] * 5, 5),
        ("expected flags of type u8", [ROWS, FLAGS.astype(jnp.int32)], 1),
        ("expected 3 rows, one per flag", [ROWS, FLAGS[:3]], 1),
        ("expected 4 rows, one per flag, of a multiple of 16 bytes", [ROWS[:, :3], FLAGS], 1),
        ("expected a result of 64 bytes, as the rows, got 128", [ROWS[:2], FLAGS[:2]], 1),
    ],
)
def test_wrong_rows_are_refused(message: str, operands: list[jax.Array], number: int):
    shape = ROWS.shape if "result of 64" in message else operands[0].shape
    call = jax.ffi.ffi_call(clear_rows.TARGET, [jax.ShapeDtypeStruct(shape, jnp.float32)] * number)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"clear_rows: {message}"):
        jax.block_until_ready(jax.jit(call)(*operands))


OFFSETS = jnp.zeros(2, jnp.int32)


@pytest.mark.parametrize(
    ("message", "operands", "has_lse"),
    [
        ("expected 1 to 4 arrays and offsets, got 1 operands and 1 results", [ROWS], False),
        ("expected offsets of type s32, at least one", [ROWS, FLAGS], False),
        ("expected offsets of type s32, at least one", [ROWS, OFFSETS[:0]], False),
        ("expected lse of type f32 with two axes", [jnp.zeros((2, 2, 2)), OFFSETS], True),
        ("expected arrays with an axis of rows", [jnp.float32(0), OFFSETS], False),
        ("expected rows of a multiple of 4 bytes, got 3", [jnp.zeros((2, 3), jnp.int8), OFFSETS],
         False),
    ],
)  # fmt: skip
def test_wrong_ends_are_refused(message: str, operands: list[jax.Array], has_lse: bool):
    shape = jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)
    call = jax.ffi.ffi_call(clear_rows.ENDS_TARGET, [shape])
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"clear_ends: {message}"):
        run = jax.jit(lambda *x: call(*x, has_lse=has_lse, invalid_is_nan=True))
        jax.block_until_ready(run(*operands))


def test_a_failed_launch_is_an_error_and_the_next_one_runs(native):
    run = jax.jit(lambda x, y: cleared_together((x, y)))
    native.driver.fail("cuLaunchKernel")
    with pytest.raises(jax.errors.JaxRuntimeError, match="cuLaunchKernel failed with status 2"):
        jax.block_until_ready(run(ROWS + 1, FLAGS))
    assert not run(ROWS + 1, FLAGS)[0].any()
