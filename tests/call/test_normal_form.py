"""Different ways to write a call have one normal form, and results in a fixed order."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention
from attn_dispatch.call.arguments import arguments_of
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.normal_form import Call, normalise


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, *shape))
    return rng.standard_normal(shape).astype(dtype)


def call_of(*args: Any, **kwargs: Any) -> Call:
    bound = inspect.signature(dot_product_attention).bind(*args, **kwargs)
    return normalise(arguments_of(bound), ("xla",))


def shapes_of(call: Call) -> dict[str, tuple[int, ...]]:
    """Shapes of the operands by name, with one batch axis."""
    spec = LeadingCall.of(call.operands, call.options).spec
    return {operand.name: operand.shape for operand in spec.operands}


Q, K, V = normal(2, 3, 4, 8), normal(2, 5, 2, 8, seed=1), normal(2, 5, 2, 6, seed=2)


def assert_same_call(*calls: dict[str, Any], q=Q, k=K, v=V) -> np.ndarray:
    """All these arguments give one result, which differs from that of a call without them."""
    expected = dot_product_attention(q, k, v, **calls[0], return_lse=True)
    for call in calls[1:]:
        got = dot_product_attention(q, k, v, **call, return_lse=True)
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    without = dot_product_attention(q, k, v, return_lse=True)
    assert any(not np.allclose(x, y) for x, y in zip(expected, without, strict=True))
    return np.asarray(expected[0])


@pytest.mark.parametrize("leading", [(), (1,), (4,), (2, 3), (2, 1, 2)])
def test_leading_dims_are_folded(leading: tuple[int, ...]):
    q, k, v = (normal(*leading, *x.shape[1:]) for x in (Q, K, V))
    rng = np.random.default_rng(0)
    per_row: dict[str, Any] = {
        "bias": normal(*leading, 4, 3, 5),
        "mask": rng.random((*leading, 1, 3, 5)) < 0.8,
        "query_seq_lengths": rng.integers(1, 4, leading),
        "key_value_seq_lengths": rng.integers(1, 6, leading),
        "query_segment_ids": np.sort(rng.integers(1, 3, (*leading, 3)), axis=-1),
        "key_value_segment_ids": np.sort(rng.integers(1, 3, (*leading, 5)), axis=-1),
        "alibi_slopes": normal(*leading, 4),
        "sinks": normal(*leading, 4),
    }
    got = dot_product_attention(q, k, v, **per_row, return_residual=True, return_lse=True)
    assert [x.shape for x in got] == [(*leading, 3, 4, 6), (*leading, 3, 4), (*leading, 3, 4)]
    call = call_of(q, k, v, **per_row)
    assert all(shape[0] == max(np.prod(leading), 1) for shape in shapes_of(call).values())
    for row in np.ndindex(*leading):
        alone: dict[str, Any] = {name: x[row] for name, x in per_row.items()}
        expected = dot_product_attention(
            q[row], k[row], v[row], **alone, return_residual=True, return_lse=True
        )
        for whole, row_alone in zip(got, expected, strict=True):
            np.testing.assert_allclose(whole[row], row_alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5,), (1, 1, 1, 5)),
        ((3, 1), (1, 1, 3, 1)),
        ((3, 5), (1, 1, 3, 5)),
        ((4, 1, 5), (1, 4, 1, 5)),
        ((1, 3, 5), (1, 1, 3, 5)),
        ((2, 1, 1, 5), (2, 1, 1, 5)),
        ((1, 4, 3, 5), (1, 4, 3, 5)),
        ((2, 4, 3, 5), (2, 4, 3, 5)),
    ],
)
def test_low_rank_masks_and_biases_extend_to_the_left(name: str, shape, expected):
    x = normal(*shape)
    x = x < np.median(x) if name == "mask" else x
    assert shapes_of(call_of(Q, K, V, **{name: x}))[name] == expected
    assert_same_call({name: x}, {name: np.broadcast_to(x, (2, 4, 3, 5))})


def test_scalar_bias_and_scalar_mask():
    # A constant bias moves lse and nothing else; a mask of False hides everything.
    out, lse = dot_product_attention(Q, K, V, bias=np.float32(2.5), return_lse=True)
    expected_out, expected_lse = dot_product_attention(Q, K, V, return_lse=True)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse + 2.5, rtol=1e-5)
    assert not np.any(dot_product_attention(Q, K, V, mask=np.False_))


def test_bias_over_several_leading_dims_is_broadcast_only_where_it_varies():
    q, k = normal(2, 3, 4, 2, 8), normal(2, 3, 6, 2, 8)
    for leading, expected in (((1, 1), 1), ((2, 3), 6), ((2, 1), 6), ((1, 3), 6), ((3,), 6)):
        bias = normal(*leading, 1, 4, 6)
        assert shapes_of(call_of(q, k, k, bias=bias))["bias"] == (expected, 1, 4, 6)
        assert_same_call(
            {"bias": bias}, {"bias": np.broadcast_to(bias, (2, 3, 2, 4, 6))}, q=q, k=k, v=k
        )


def test_windows_become_pairs():
    assert call_of(Q, K, V, local_window_size=2).options.meaning.window == (2, 2)
    assert call_of(Q, K, V, local_window_size=[1, None]).options.meaning.window == (1, None)
    assert call_of(Q, K, V, local_window_size=np.int64(0)).options.meaning.window == (0, 0)
    assert call_of(Q, K, V).options.meaning.window == (None, None)
    i, j = np.arange(3)[:, None], np.arange(5)[None, :]
    assert_same_call({"local_window_size": 1}, {"local_window_size": (1, 1)},
                     {"mask": abs(i - j) <= 1})  # fmt: skip
    assert_same_call({"local_window_size": (1, None)}, {"mask": j >= i - 1})
    assert_same_call({"local_window_size": (None, 0)}, {"is_causal": True}, {"mask": j <= i})


def test_one_sided_segment_ids_serve_both_sides():
    ids = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 3, 3]])
    q = normal(2, 5, 4, 8)
    assert_same_call(
        {"query_segment_ids": ids},
        {"key_value_segment_ids": ids},
        {"query_segment_ids": ids, "key_value_segment_ids": ids},
        q=q,
    )


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_of_any_integer_dtype_or_as_lists(name: str):
    by_dtype = [{name: np.array([2, 1], dtype)} for dtype in ("int8", "uint32", "int32")]
    expected = assert_same_call({name: [2, 1]}, *by_dtype)
    for row, length in enumerate((2, 1)):  # an unbatched call takes one number, or one in a list
        for given in (length, [length], np.int32(length)):
            alone = dot_product_attention(Q[row], K[row], V[row], **{name: given})
            np.testing.assert_allclose(alone, expected[row], rtol=1e-5, atol=1e-6)


def test_per_head_operands_with_and_without_a_batch_axis():
    for name in ("sinks", "alibi_slopes"):
        x = normal(4)
        assert shapes_of(call_of(Q, K, V, **{name: x}))[name] == (1, 4)
        assert_same_call({name: x}, {name: np.broadcast_to(x, (2, 4))})


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_raw_and_typed_keys_are_the_same_key(impl: str):
    typed = jax.random.key(5, impl=impl)
    with jax.default_prng_impl(impl):  # a raw key belongs to the default implementation
        raw = jax.random.PRNGKey(5)
        assert (
            call_of(Q, K, V, dropout_rate=0.5, dropout_key=raw).options.meaning.dropout_impl == impl
        )
        calls = [{"dropout_rate": 0.5, "dropout_key": key} for key in (raw, np.asarray(raw), typed)]
        expected = assert_same_call(*calls)
        under_jit = jax.jit(partial(dot_product_attention, dropout_rate=0.5))
        got = under_jit(Q, K, V, dropout_key=raw)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    other = dot_product_attention(
        Q, K, V, dropout_rate=0.5, dropout_key=jax.random.key(6, impl=impl)
    )
    assert not np.array_equal(other, expected)


def test_dropout_key_without_dropout_is_ignored():
    call = call_of(Q, K, V, dropout_key=jax.random.key(0))
    assert call.options == call_of(Q, K, V).options


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_order_shapes_and_dtypes_of_results(dtype: str):
    q, k, v = (jnp.asarray(x, dtype) for x in (Q, K, V))
    out = dot_product_attention(q, k, v)
    pair = dot_product_attention(q, k, v, return_residual=True)
    with_lse = dot_product_attention(q, k, v, return_lse=True)
    both = dot_product_attention(q, k, v, return_residual=True, return_lse=True)
    assert [len(x) for x in (pair, with_lse, both)] == [2, 2, 3]
    assert [(x.shape, x.dtype) for x in both] == [
        ((2, 3, 4, 6), dtype), ((2, 3, 4), dtype), ((2, 3, 4), "float32")
    ]  # fmt: skip
    for x, y in ((pair[0], out), (with_lse[0], out), (both[0], out), (both[1], pair[1])):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(both[2], with_lse[1])
    np.testing.assert_array_equal(both[1], both[2].astype(dtype))


def test_python_lists_are_accepted():
    options: dict[str, Any] = {
        "mask": [True, False, True, True, True], "bias": [[0.5], [1.0], [-1.0]],
        "query_seq_lengths": [3, 2], "sinks": [0.0, 1.0, 2.0, 3.0],
    }  # fmt: skip
    arrays: dict[str, Any] = {name: np.asarray(x) for name, x in options.items()}
    got = dot_product_attention(Q.tolist(), K.tolist(), V.tolist(), **options)
    np.testing.assert_array_equal(got, dot_product_attention(Q, K, V, **arrays))


def test_scale_becomes_a_python_float():
    assert call_of(Q, K, V).options.meaning.scale == 1 / np.sqrt(8)
    for scale in (np.float32(0.5), jnp.asarray(0.5), np.array([[0.5]])[0, 0]):
        options = call_of(Q, K, V, scale=scale).options
        assert options.meaning.scale == 0.5 and type(options.meaning.scale) is float
    assert_same_call({"scale": 0.5}, {"scale": jnp.asarray(0.5)})
