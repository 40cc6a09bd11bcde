"""Lengths, segment ids and cu_seqlens: values known on the host are checked, without waiting."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import (
    dot_product_attention,
    explain,
    settings,
)
from attn_dispatch.call import values
from attn_dispatch.call.values import Limits, check_values, known_values

T, S = 4, 6
Q, KV = np.zeros((2, T, 2, 8), np.float32), np.zeros((2, S, 2, 8), np.float32)
IDS: dict[str, Any] = {"query_segment_ids": [[1, 1, 2, 0], [0, 1, 0, 3]],
       "key_value_segment_ids": [[1, 2, 2, 2, 2, 2], [0, 0, 1, 1, 3, 3]]}  # fmt: skip

_ANY_ORDER = "; without max_segments ids may stand in any order, which kernels run as a mask"

_WRONG_VALUES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"query_seq_lengths": [4, 5]}, "query_seq_lengths: expected lengths from 0 to 4, got 5"),
    ({"query_seq_lengths": [-1, 4]}, "query_seq_lengths: expected lengths from 0 to 4, got -1"),
    ({"key_value_seq_lengths": [6, 7]},
     "key_value_seq_lengths: expected lengths from 0 to 6, got 7"),
    (IDS | {"query_segment_ids": [[1, 1, 1, 1], [0, -3, 1, 1]]},
     "query_segment_ids: expected ids of 0 (padding) and above, got -3; where -1 is padding add 1 "
     "to all ids"),
    (IDS | {"max_segments": 2}, "query_segment_ids: expected ids up to max_segments=2, got 3"),
    (IDS | {"key_value_segment_ids": [[1, 2, 2, 2, 2, 2], [0, 3, 3, 0, 1, 1]], "max_segments": 3},
     "key_value_segment_ids: expected ids ascending along the row with max_segments, got 1 after 3"
     + _ANY_ORDER),
    (IDS | {"query_segment_ids": [[1, 1, 2, 0], [1, 0, 1, 3]], "max_segments": 3},
     "query_segment_ids: expected the places of an id to follow one another with max_segments, got "
     "1 again after padding" + _ANY_ORDER),
    (IDS | {"max_segments": 3, "max_segment_len": 4},
     "key_value_segment_ids: expected no segment longer than max_segment_len=4, got one of 5"),
)  # fmt: skip


@pytest.mark.parametrize("convert", [lambda x: x, np.asarray, jnp.asarray])
@pytest.mark.parametrize(("arguments", "message"), _WRONG_VALUES)
def test_wrong_known_values_raise(arguments: dict[str, Any], message: str, convert: Any):
    given: dict[str, Any] = {
        x: convert(y) if isinstance(y, list) else y for x, y in arguments.items()
    }
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dot_product_attention(Q, KV, KV, **given)
    # Under jit, values are known unless they are arguments of the traced function.
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.jit(lambda q: dot_product_attention(q, KV, KV, **given))(Q)


@pytest.mark.parametrize(("arguments", "message"), _WRONG_VALUES)
def test_wrong_traced_values_give_nan(arguments: dict[str, Any], message: str):
    del message
    static: dict[str, Any] = {x: y for x, y in arguments.items() if isinstance(y, int)}
    traced: dict[str, Any] = {x: jnp.asarray(y) for x, y in arguments.items() if x not in static}

    @jax.jit
    def call(traced):
        return dot_product_attention(Q, KV, KV, **traced, **static)

    assert np.isnan(call(traced)).any()
    shapes: dict[str, Any] = {x: jax.ShapeDtypeStruct(y.shape, y.dtype) for x, y in traced.items()}
    assert explain(Q, KV, KV, **shapes, **static).chosen_forward == "xla"


def test_only_rows_with_wrong_values_are_nan():
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, n, 2, 8), np.float32) for n in (5, 7))

    @jax.jit
    def call(arrays: dict[str, Any]):
        return dot_product_attention(
            q, k, k, is_causal=True, return_lse=True, return_max_logits=True, **arrays,
            max_segments=3 if "query_segment_ids" in arrays else None,
        )  # fmt: skip

    def check(wrong: dict[str, Any], right: dict[str, Any], rows: list[int]) -> None:
        """Only the first batch row has wrong values; nothing in the second changes."""
        for got, expected in zip(
            *(call({x: jnp.asarray([y, right[x]]) for x, y in z.items()}) for z in (wrong, right)),
            strict=True,
        ):
            expected = np.array(expected)
            expected[0, rows] = np.nan
            np.testing.assert_array_equal(got, expected)

    all_rows = list(range(5))
    for lengths in (-1, 6, 99):
        check({"query_seq_lengths": lengths}, {"query_seq_lengths": 5}, all_rows)
    for lengths in (-1, 8):
        check({"key_value_seq_lengths": lengths}, {"key_value_seq_lengths": 7}, all_rows)
    keys = {"key_value_segment_ids": [1, 1, 2, 2, 2, 3, 3]}
    right = keys | {"query_segment_ids": [1, 1, 0, 2, 3]}
    check(keys | {"query_segment_ids": [1, 1, -1, 2, 3]}, right, [2])
    check(keys | {"query_segment_ids": [1, 1, 4, 2, 3]}, right, [2])
    check(keys | {"query_segment_ids": [1, 1, 0, 2, -7]}, right, [4])
    # An id out of order, among queries or keys, affects every query with that id.
    check(keys | {"query_segment_ids": [1, 1, 3, 2, 3]}, right, [2, 3, 4])
    check(right | {"key_value_segment_ids": [1, 1, 2, 2, 2, 3, 1]}, right, [0, 1])
    check(right | {"key_value_segment_ids": [2, 1, 1, 0, 0, 3, 3]}, right | {
        "key_value_segment_ids": [2, 0, 0, 0, 0, 3, 3]}, [0, 1])  # fmt: skip


@pytest.mark.parametrize("side", ["query", "key"])
def test_rows_with_wrong_ids_carry_no_gradient(side: str):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 6, 2, 8), np.float32) for _ in range(2))
    ids: dict[str, Any] = {
        f"{x}_segment_ids": jnp.array([[1, 1, 2, 2, 3, 3]]) for x in ("query", "key_value")
    }
    wrong = "query_segment_ids" if side == "query" else "key_value_segment_ids"
    wrong_ids = ids | {wrong: jnp.array([[1, 1, 2, 2, 3, 1]])}

    @jax.jit
    def grads(ids):
        def loss(operands):
            out, lse = dot_product_attention(*operands, **ids, max_segments=3, return_lse=True)
            return (out**2).sum() + lse.sum()

        return jax.grad(loss)((q, k, k))

    right = grads({x: y.at[0, 4:].set(0).at[0, :2].set(0) for x, y in ids.items()})
    for got, expected in zip(grads(wrong_ids), right, strict=True):
        # Position 4, with id 3, has lost its segment's other position on one side.
        np.testing.assert_array_equal(got[:, :4], expected[:, :4])
        assert np.isfinite(got).all() and np.all(got[:, :2] == 0) and np.any(got[:, 2:4] != 0)


def test_ids_past_a_known_length_are_not_checked():
    ids: dict[str, Any] = {"query_segment_ids": [[1, 1, 2, -5], [3, 0, 3, 1]],
           "key_value_segment_ids": [[1, 2, 3, 4, 5, 6]] * 2, "max_segments": 6}  # fmt: skip
    out = dot_product_attention(Q, KV, KV, **ids, query_seq_lengths=[3, 1])
    assert out.shape == Q.shape
    # With traced lengths it is unknown which positions are padding.
    call = jax.jit(lambda n: dot_product_attention(Q, KV, KV, **ids, query_seq_lengths=n))
    assert call(jnp.array([3, 1])).shape == Q.shape
    with pytest.raises(ValueError, match="got 1 after 3"):
        dot_product_attention(Q, KV, KV, **ids, query_seq_lengths=[3, 4])


def test_known_values_of_host_arrays_and_of_tracers():
    for known in (3, [1, 2], np.int8(4), np.arange(3), jnp.arange(3)):
        np.testing.assert_array_equal(known_values(known), known)
    assert known_values(None) is None
    seen = []
    jax.jit(lambda x: seen.append((known_values(x), known_values([x, 1]))))(1)
    assert seen == [(None, None)]


def test_array_on_an_accelerator_is_not_read(monkeypatch):
    class ArrayOnGpu:
        """A stand-in for a jax.Array on a GPU: reading it on the host fails."""

        is_fully_addressable = True

        def devices(self):
            return [SimpleNamespace(platform="gpu")]

        def __array__(self, *args: Any):
            raise AssertionError("read on the host")

    x = ArrayOnGpu()
    fake_jax = SimpleNamespace(Array=(jax.Array, ArrayOnGpu), tree=jax.tree)
    monkeypatch.setattr(values, "jax", fake_jax)
    assert known_values(x) is None
    arrays: dict[str, Any] = {"query_seq_lengths": x, "query_segment_ids": np.ones((2, T), int)}
    check_values(arrays, Limits((T, S)))
    with (
        settings.restored(replace(settings.current(), check=True)),
        pytest.raises(AssertionError, match="read on the host"),
    ):
        check_values(arrays, Limits((T, S)))
