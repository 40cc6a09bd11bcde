"""Calls whose cu_seqlens are the kernels' offsets, because their padding is finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import ragged_dot_product_attention
from attn_dispatch.core import primitive
from attn_dispatch.devices import clear_rows
from attn_dispatch.flash import kernels, library, sequences
from attn_dispatch.flash.call import lies_end_to_end
from attn_dispatch.flash.generations import FA2, FA3
from attn_dispatch.inspection import spec_of
from tests.support import fa4_on_cpu, flash_in_numpy
from tests.support.lowered import calls_in, lowered_for_cuda

ROWS, LONGEST = 400, 302
ENDS = [0, 10, 10, 299, 387]
"""One sequence is empty, and the last 13 rows are in none."""
STRUCT = jax.ShapeDtypeStruct((5,), jnp.int32)
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy as the kernels of an H200, which read and write nothing past the last offset."""
    monkeypatch.setattr(library, "version", lambda: "0.3.6")
    monkeypatch.setattr(kernels, "forward", flash_in_numpy.forward)
    monkeypatch.setattr(kernels, "backward", flash_in_numpy.backward)
    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    monkeypatch.setattr(
        primitive, "device_for", lambda platform: replace(fa4_on_cpu.SM90, is_present=False)
    )


def operands(*, padding: float = 0) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(ROWS, n, 64) for n in (4, 2, 2, 4)]
    arrays = (jax.random.normal(x, y, jnp.bfloat16) for x, y in zip(keys, shapes, strict=True))
    return [x.at[ENDS[-1] :].set(padding) for x in arrays]


def attention(**options: Any) -> Callable[..., Any]:
    given: dict[str, Any] = {"is_causal": True, "return_lse": True, "implementation": "flash"}
    given |= {"max_seqlen_q": LONGEST, "max_seqlen_kv": LONGEST} | options

    def call(q: Any, k: Any, v: Any, ends: Any) -> Any:
        return ragged_dot_product_attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, **given)

    return call


def both(q: Any, k: Any, v: Any, out_grad: Any, ends: Any, **options: Any) -> Any:
    call = attention(**options)
    (out, lse), pull = jax.vjp(lambda *x: call(*x, ends), q, k, v)
    return out, lse, *pull((out_grad, jnp.ones_like(lse)))


def results(ends: Any, *, padding: float = 0, **options: Any) -> Arrays:
    def program(*arrays: Any) -> Any:
        return both(*arrays, **options)

    with fa4_on_cpu.for_h200():
        found = jax.jit(program)(*operands(padding=padding), jnp.asarray(ends, jnp.int32))
    names = ("out", "lse", "dq", "dk", "dv")
    return dict(zip(names, (np.asarray(x, np.float32) for x in found), strict=True))


@pytest.mark.parametrize("window", [None, (50, 0)])
def test_results_are_those_without_the_promise(window: Any):
    expected = results(ENDS, local_window_size=window)
    found = results(ENDS, padding=1e4, finite_padding=True, local_window_size=window)
    for name, x in found.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
        assert not np.isnan(x).any()
    assert (found["lse"][ENDS[-1] :] == -np.inf).all()
    for name in ("out", "dq", "dk", "dv"):
        assert not found[name][ENDS[-1] :].any() and found[name][: ENDS[-1]].any(), name


def test_all_rows_may_be_padding():
    found = results([0] * 5, finite_padding=True)
    assert (found.pop("lse") == -np.inf).all()
    assert not any(x.any() for x in found.values())


WRONG = {
    "not from 0": [1, 10, 10, 299, 387],
    "below 0": [0, -5, 10, 299, 387],
    "descends": [0, 10, 9, 299, 387],
    "ends past the rows": [0, 10, 150, 299, ROWS + 1],
    "one is too long": [0, 10, 10, 313, 387],
    "differences overflow": [0, 2**31 - 1, -(2**31), 1, 2],
    "ends before 0": [0, 10, 10, 299, -1],
}


@pytest.mark.parametrize("ends", WRONG.values(), ids=WRONG)
def test_wrong_cu_seqlens_make_the_whole_call_nan(ends: list[int]):
    """Gradients are 0, and the stand-ins refuse offsets outside of the arrays."""
    found = results(ends, finite_padding=True)
    for name in ("out", "lse"):
        assert np.isnan(found.pop(name)).all(), name
    assert not any(x.any() for x in found.values())


def test_many_sequences_are_checked_alike(monkeypatch: pytest.MonkeyPatch):
    expected = results(ENDS, finite_padding=True)
    monkeypatch.setattr(sequences, "_MOST_COMPARED", 2)
    for name, x in results(ENDS, finite_padding=True).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    test_wrong_cu_seqlens_make_the_whole_call_nan(WRONG["descends"])


def test_kernels_are_given_the_sequences_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(library, "version", lambda: "0.3.6")
    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    shapes = [jax.ShapeDtypeStruct((ROWS, n, 64), jnp.bfloat16) for n in (4, 2, 2, 4)]

    def program(*arrays: Any) -> Any:
        return both(*arrays, finite_padding=True)

    with fa4_on_cpu.for_h200():
        calls = calls_in(lowered_for_cuda(jax.jit(program), *shapes, STRUCT))
    for direction in ("forward", "backward"):
        _, given, scratch = calls[f"attn_dispatch_flash_{direction}_packed"]
        assert given[-2:] == ["5xi32", "5xi32"]
    assert scratch[3:] == [f"{4 * (ROWS + 128 * 5)}xf32"] * 2


def test_calls_whose_cu_seqlens_kernels_take_as_they_are():
    array = jax.ShapeDtypeStruct((ROWS, 4, 64), jnp.bfloat16)

    def is_one(*, ends: Any = STRUCT, others: Any = None, **options: Any) -> bool:
        spec = spec_of(
            query=array, key=array, value=array, cu_seqlens_q=ends,
            cu_seqlens_kv=ends if others is None else others, max_seqlen_q=LONGEST,
            max_seqlen_kv=LONGEST, **options,
        )  # fmt: skip
        return lies_end_to_end(spec, FA3)

    promised = {"finite_padding": True}
    assert is_one(**promised) and is_one(**promised, is_causal=True)
    assert is_one(**promised, is_causal=True, causal_alignment="bottom_right")
    assert is_one(**promised, local_window_size=(3, 4))
    assert not is_one()
    assert not is_one(**promised, others=jax.ShapeDtypeStruct((5,), jnp.int32))
    full = np.array([0, 100, 301, ROWS], np.int32)
    assert is_one(ends=full) and not is_one(ends=full[:-1])
    spec = spec_of(
        query=array, key=array, value=array, cu_seqlens_q=full, cu_seqlens_kv=full,
        max_seqlen_q=LONGEST, max_seqlen_kv=LONGEST,
    )  # fmt: skip
    assert not lies_end_to_end(spec, FA2)
