"""`finite_padding`: when kernels may read padding rows as they are, and what then clears none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, finite_padding
from attn_dispatch.core import primitive
from attn_dispatch.devices import clear_rows
from attn_dispatch.fa4 import compiled
from attn_dispatch.flash import kernels, library
from attn_dispatch.inspection import explain, spec_of
from tests.support import fa4_on_cpu, flash_in_numpy
from tests.support.lowered import lowered_for_cuda

ROWS = 400
IDS = np.repeat([1, 2, 0, 3], [10, 289, 13, 88]).astype(np.int32)[None]
"""Padding begins further from the first document than any tile is long."""
FULL_IDS = np.repeat([1, 2, 3], [10, 302, 88]).astype(np.int32)[None]
LENGTHS = {"query_seq_lengths": [8, 8], "key_value_seq_lengths": [8, 8]}
OTHERS = {"query_seq_lengths": [8, 7], "key_value_seq_lengths": [8, 7]}
Q = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((8, 4, 16), jnp.bfloat16)
Arrays = list[Any]


def meaning(*, ragged: bool = False, **given: Any) -> bool:
    array = ROW if ragged else Q
    if ragged:
        given |= {"max_seqlen_q": 8, "max_seqlen_kv": 8}
    return spec_of(query=array, key=array, value=array, **given).meaning.finite_padding


def ids(*row: int) -> dict[str, Any]:
    return {"query_segment_ids": np.array([row, row]), "max_segments": 3}


def ends(*q: int, kv: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {"ragged": True, "cu_seqlens_q": list(q), "cu_seqlens_kv": list(kv or q)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        (LENGTHS, True),
        (OTHERS, False),
        ({"key_value_seq_lengths": [8, 8]}, True),
        ({"query_seq_lengths": [8, 8], "key_value_seq_lengths": [8, 7]}, False),
        (ids(1, 1, 1, 2, 2, 2, 2, 3), True),
        (ids(1, 1, 1, 2, 2, 2, 2, 0), False),
        (ids(1, 1, 1, 2, 2, 2, 2, 3) | OTHERS, False),
        ({"query_segment_ids": jnp.ones((2, 8), int), "max_segments": 3}, False),
        (ends(0, 3, 8), True),
        (ends(0, 3, 7), False),
        (ends(0, 3, 8, kv=(0, 3, 7)), False),
        ({"ragged": True} | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), jnp.arange(9)), False),
    ],
)
def test_calls_that_show_that_there_is_no_padding(given: dict[str, Any], expected: bool):
    """Numbers on the host do; a jax.Array is not read, which might wait for a device."""
    assert meaning(**given) is expected


def test_the_number_of_rows_is_that_of_the_layout():
    swapped = jax.ShapeDtypeStruct((2, 4, 8, 16), jnp.bfloat16)
    given: dict[str, Any] = {"query": swapped, "key": swapped, "value": swapped}
    spec = spec_of(**given, **LENGTHS, qkv_layout="BNTH")
    assert spec.meaning.finite_padding


def test_the_argument_goes_before_the_setting(monkeypatch: pytest.MonkeyPatch):
    assert meaning(**OTHERS, finite_padding=True) and not meaning(**OTHERS, finite_padding=False)
    assert meaning(**ends(0, 3, 7), finite_padding=True)
    with finite_padding(True):
        assert meaning(**OTHERS) and not meaning(**OTHERS, finite_padding=False)
        assert not meaning()  # no row is padding
    monkeypatch.setenv("ATTN_DISPATCH_FINITE_PADDING", "1")
    assert meaning(**OTHERS)
    with finite_padding(False):
        assert not meaning(**OTHERS) and meaning(**OTHERS, finite_padding=True)


def test_pages_may_be_anyones():
    """Their keys past a length are not the caller's to promise."""
    pages = jax.ShapeDtypeStruct((4, 8, 4, 16), jnp.bfloat16)
    with finite_padding(True):
        spec = spec_of(
            query=Q, key_pages=pages, value_pages=pages, page_table=np.zeros((2, 2), np.int32),
            key_value_seq_lengths=[9, 9],
        )  # fmt: skip
    assert not spec.meaning.finite_padding


def test_a_program_is_traced_again_in_a_block():
    @jax.jit
    def program(q: jax.Array, lengths: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, key_value_seq_lengths=lengths)

    def text() -> str:
        arrays = (jax.ShapeDtypeStruct(x, y) for x, y in ((Q.shape, Q.dtype), ((2,), jnp.int32)))
        return str(program.trace(*arrays).jaxpr)

    outside = text()
    with finite_padding(True):
        inside = text()
    assert "finite_padding=False" in outside and "finite_padding=True" in inside
    assert text() == outside


def test_explain_shows_the_promise_in_both_directions():
    found = explain(Q, Q, Q, **OTHERS, finite_padding=True, implementation="xla", target="sm90")
    assert str(found).count("finite_padding") >= 1
    assert "finite_padding" not in str(
        explain(Q, Q, Q, **OTHERS, implementation="xla", target="sm90")
    )


def attention(implementation: str, **options: Any) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return dot_product_attention(
            q, k, v, query_segment_ids=ids, max_segments=3, is_causal=True,
            implementation=implementation, **options,
        )  # fmt: skip

    return call


def both(call: Callable[..., Any]) -> Callable[..., Any]:
    def passes(q: Any, k: Any, v: Any, out_grad: Any, ids: Any) -> Any:
        out, pull = jax.vjp(lambda *x: call(*x, ids), q, k, v)
        return out, *pull(out_grad)

    return passes


@pytest.fixture(params=["flash", "fa4"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An implementation of an H200 that is not there, with the custom call that clears rows."""
    monkeypatch.setattr(compiled, "find", lambda: fa4_on_cpu.LIBRARY)
    monkeypatch.setattr(library, "version", lambda: "0.3.6")
    monkeypatch.setattr(clear_rows, "_native", lambda: object())
    return request.param


def clears(program: Callable[..., Any], *arrays: Any) -> list[int]:
    """How many arrays each custom call clears, in the order of the program."""
    with fa4_on_cpu.for_h200():
        text = lowered_for_cuda(jax.jit(program), *arrays)
    lines = re.findall(rf"custom_call @{clear_rows.TARGET}\((.*?)\)", text)
    return [len(x.split(",")) // 2 for x in lines]


def of_shapes(*, dtype: Any = jnp.bfloat16) -> Arrays:
    return [jax.ShapeDtypeStruct((1, ROWS, n, 64), dtype) for n in (4, 2, 2, 4)]


TRACED = jax.ShapeDtypeStruct((1, ROWS), jnp.int32)


def test_operands_are_cleared_without_a_promise(implementation: str):
    call = attention(implementation)
    before_backward = 4 if implementation == "fa4" else 3  # fa4 also clears out
    assert clears(call, *of_shapes()[:3], TRACED) == [1, 1]  # value; out
    found = clears(both(call), *of_shapes(), TRACED)
    assert sorted(found) == sorted([1, 1, before_backward, 1, 3])


def test_results_alone_are_cleared_with_the_promise(implementation: str):
    promised = attention(implementation, finite_padding=True)
    assert clears(promised, *of_shapes()[:3], TRACED) == [1]
    assert clears(both(promised), *of_shapes(), TRACED) == [1, 3]


def test_results_alone_are_cleared_where_no_row_is_padding(implementation: str):
    call = attention(implementation)

    def known(*arrays: Any) -> Any:
        return both(call)(*arrays, FULL_IDS)

    assert clears(known, *of_shapes()) == [1, 3]


def test_the_backward_pass_keeps_the_promise_of_a_block(implementation: str):
    call = attention(implementation)

    def passes(q: Any, k: Any, v: Any, out_grad: Any, ids: Any) -> Any:
        with finite_padding(True):
            out, pull = jax.vjp(lambda *x: call(*x, ids), q, k, v)
        return out, *pull(out_grad)

    assert clears(passes, *of_shapes(), TRACED) == [1, 3]


@pytest.fixture
def on_cpu(implementation: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """NumPy as the kernels, which multiply whole tiles."""
    fa4_on_cpu.install(monkeypatch)
    monkeypatch.setattr(kernels, "forward", flash_in_numpy.forward)
    monkeypatch.setattr(kernels, "backward", flash_in_numpy.backward)
    monkeypatch.setattr(
        primitive, "device_for", lambda platform: replace(fa4_on_cpu.SM90, is_present=False)
    )
    return implementation


NAMES = ("query", "key", "value", "out_grad")


def results(implementation: str, padding: float, **options: Any) -> dict[str, np.ndarray]:
    """Both passes with this number in padding rows."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jnp.where((IDS > 0)[..., None, None], jax.random.normal(key, x.shape, x.dtype), padding)
        for key, x in zip(keys, of_shapes(), strict=True)
    ]
    with fa4_on_cpu.for_h200():
        found = jax.jit(both(attention(implementation, **options)))(*arrays, jnp.asarray(IDS))
    return dict(
        zip(("out", "dq", "dk", "dv"), (np.asarray(x, np.float32) for x in found), strict=True)
    )


@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e4])
def test_padding_affects_nothing_without_a_promise(on_cpu: str, padding: float):
    expected = results(on_cpu, 0)
    for name, x in results(on_cpu, padding).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_finite_padding_affects_nothing_with_the_promise(on_cpu: str):
    expected = results(on_cpu, 0)
    for name, x in results(on_cpu, 1e4, finite_padding=True).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_nan_in_padding_reaches_only_documents_beside_it(on_cpu: str):
    """What docs/semantics.md says of a broken promise."""
    expected, found = results(on_cpu, 0), results(on_cpu, np.nan, finite_padding=True)
    for name, x in found.items():
        assert np.isnan(x[:, 10:299]).any(), name
        np.testing.assert_array_equal(x[:, :10], expected[name][:, :10], err_msg=name)
        assert not x[:, 299:312].any(), name  # padding itself


@pytest.mark.parametrize("promised", [False, True])
def test_xla_ignores_the_promise(promised: bool):
    expected = results("xla", 0)
    for name, x in results("xla", np.nan, finite_padding=promised).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
