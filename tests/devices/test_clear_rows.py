"""Rows cleared in place by the CUDA library, or by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.devices import clear_rows
from tests.support.lowered import calls_in, lowered_for_cuda
from tests.support.module_report import report_with_cuda_plugin

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


def test_several_arrays_are_cleared_by_one_call(monkeypatch):
    """An array without flags is left, and one that the library cannot clear goes to XLA."""
    monkeypatch.setattr(clear_rows, "_native", lambda: object())
    flags = jax.ShapeDtypeStruct((1, 6), bool)
    shapes = [(1, 6, 2, 8), (1, 6, 3, 5), (1, 6, 4, 8), (1, 6, 1, 8)]
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]

    def program(flags, a, b, c, d):
        return clear_rows.cleared_together((a, flags), (b, flags), (c, None), (d, flags))

    lowered = lowered_for_cuda(jax.jit(program), flags, *arrays)
    line, operands, _ = calls_in(lowered)[clear_rows.TARGET]
    assert operands == ["6x2x8xbf16", "6x1x8xbf16", "6xui8", "6xui8"]
    assert line.count("output_operand_alias<") == 2
    assert [x.shape for x in jax.eval_shape(program, flags, *arrays)] == shapes


def test_xla_clears_several_arrays(monkeypatch):
    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    x, y = jnp.ones((1, 3, 1, 1)), jnp.full((1, 3, 1, 1), 2.0)
    found = clear_rows.cleared_together((x, jnp.asarray([[True, False, True]])), (y, None))
    np.testing.assert_array_equal([z[0, :, 0, 0] for z in found], [[1, 0, 1], [2, 2, 2]])


@pytest.fixture(scope="module")
def report():
    return report_with_cuda_plugin("tests.devices.copied_to_clear")


@pytest.mark.parametrize("implementation", ["fa4", "flash"])
def test_a_training_step_copies_no_array_to_clear_it(report, implementation):
    """Only fa4 clears out, which the gradient of the next projection's weights reads as well."""
    most = 1 if implementation == "fa4" else 0
    for name, clears in {"a layer": 4, "a scan, no remat": 5, "a scan, remat": 6}.items():
        row = report[f"{implementation}, {name}"]
        assert sum(row["copies"]) <= most and row["clears"] == clears, (name, row)


@pytest.mark.parametrize("implementation", ["fa4", "flash"])
def test_the_steps_of_a_ring_clear_results_alone(report, implementation):
    """Operands are cleared once, before the first step; but fa4 clears out in each."""
    forward = backward = 3  # one for the own keys, and two branches
    most = forward + backward * (2 if implementation == "fa4" else 1)
    assert report[f"{implementation}, a ring"]["clears"] == most


@pytest.mark.parametrize("implementation", ["fa4", "flash"])
def test_the_callers_arrays_are_copied_once(report, implementation):
    forward = report[f"{implementation}, the caller's, forward"]
    assert forward == {"copies": [0, 1], "clears": 2}  # value
    gradients = report[f"{implementation}, the caller's, gradients"]
    assert gradients == {"copies": [0, 4], "clears": 4}  # query, key, value and out_grad


@pytest.mark.parametrize("implementation", ["fa4", "flash"])
def test_nothing_is_copied_where_padding_is_promised_to_be_finite(report, implementation):
    """Not even where the output is a result as well; kernels' own results are cleared in place."""
    assert report[f"{implementation}, promised, forward"] == {"copies": [0, 0], "clears": 1}
    assert report[f"{implementation}, promised, both"] == {"copies": [0, 0], "clears": 2}


@pytest.mark.parametrize("count", [8, 64])
def test_xla_adds_few_kernels_to_calls_with_cu_seqlens(report, count):
    """It finds the offsets, once for both passes."""
    forward, both = (report[f"cu_seqlens of {count}, {x}"] for x in ("forward", "both"))
    assert forward == {"copies": [0, 0], "clears": 1, "kernels": 1}
    assert both == {"copies": [0, 0], "clears": 2, "kernels": 1}
