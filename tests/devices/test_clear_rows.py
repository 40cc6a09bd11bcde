"""Rows cleared in place by the CUDA library, or by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.devices import clear_rows
from tests.support.lowered import calls_in, lowered_for_cuda

PADDING, REAL, INVALID = range(3)


def calls(x: jax.ShapeDtypeStruct, flags: jax.ShapeDtypeStruct):
    return calls_in(lowered_for_cuda(jax.jit(clear_rows.cleared), x, flags))


def test_the_library_clears_rows_in_place(monkeypatch):
    monkeypatch.setattr(clear_rows, "_native", lambda: object())
    x = jax.ShapeDtypeStruct((2, 6, 2, 8), jnp.bfloat16)
    line, operands, _ = calls(x, jax.ShapeDtypeStruct((1, 6), bool))[clear_rows.TARGET]
    assert operands == ["12x2x8xbf16", "12xui8"] and "output_operand_alias" in line


def test_rows_that_the_library_cannot_clear_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(clear_rows, "_native", lambda: object())
    x = jax.ShapeDtypeStruct((2, 6, 3, 5), jnp.bfloat16)
    assert clear_rows.TARGET not in calls(x, jax.ShapeDtypeStruct((2, 6), bool))


def test_rows_of_single_heads_are_cleared(monkeypatch):
    monkeypatch.setattr(clear_rows, "_native", lambda: object())
    x = jax.ShapeDtypeStruct((2, 6, 3, 8), jnp.bfloat16)
    _, operands, _ = calls(x, jax.ShapeDtypeStruct((1, 6, 3), bool))[clear_rows.TARGET]
    assert operands == ["36x8xbf16", "36xui8"]
    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    flags = jnp.asarray([[[True, False], [False, True]]])
    out = clear_rows.cleared(jnp.ones((1, 2, 2, 3)), flags)
    np.testing.assert_array_equal(out.sum(-1), [[[3, 0], [0, 3]]])


@pytest.mark.parametrize("batch", [1, 2])
def test_xla_clears_rows_by_their_flags(monkeypatch, batch: int):
    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    flags = jnp.asarray([[REAL, PADDING, INVALID]] * batch, jnp.uint8)
    out = clear_rows.cleared(jnp.ones((2, 3, 1, 1)), flags)[..., 0, 0]
    np.testing.assert_array_equal(out, [[1, 0, np.nan]] * 2)
