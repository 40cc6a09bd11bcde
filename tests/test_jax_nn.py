"""The arguments of `jax.nn.dot_product_attention` give the same values and gradients here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention

B, T, S, N, K, H = 2, 7, 9, 4, 2, 8

_rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape).astype(np.float32)


Q, KEY, V, OUT_GRAD = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H), normal(B, T, N, H)
# Every row attends a key: for a row without one jax.nn gives the mean of all values, and we give 0.
MASK = (_rng.random((B, N, T, S)) < 0.6) | (np.arange(S) == 0)

_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale_of_zero": {"scale": 0.0},
    "negative_scale": {"scale": -0.3, "is_causal": True},
    "mask": {"mask": MASK},
    "mask_of_keys": {"mask": MASK[:, :1, :1]},
    "bias": {"bias": normal(B, N, T, S)},
    "bias_of_keys": {"bias": normal(B, 1, 1, S)},
    "bias_mask_causal": {"bias": normal(1, N, T, S), "mask": MASK, "is_causal": True},
    "key_lengths": {"key_value_seq_lengths": np.array([3, 9])},
    "key_lengths_causal": {"key_value_seq_lengths": np.array([8, 1]), "is_causal": True},
    "window": {"local_window_size": 2},
    "window_zero": {"local_window_size": 0},
    "window_pair": {"local_window_size": (3, 1)},
    "window_causal": {"local_window_size": 2, "is_causal": True},
    "everything": {
        "bias": normal(1, N, T, S), "is_causal": True, "local_window_size": (4, 1), "scale": 0.4,
        "key_value_seq_lengths": np.array([7, 9]),
    },
}  # fmt: skip


def ours_and_theirs(options: dict[str, Any], q=Q, k=KEY, v=V, out_grad=OUT_GRAD) -> list[Any]:
    """The gradients of q, k, v and bias, and (out, residual): of our call, and of jax.nn's."""
    floats: dict[str, Any] = {"query": q, "key": k, "value": v}
    floats |= {"bias": options["bias"]} if "bias" in options else {}
    rest: dict[str, Any] = {name: x for name, x in options.items() if name != "bias"}

    def run(function: Any, **more: Any) -> Any:
        def loss(floats):
            out, residual = function(**floats, **rest, return_residual=True, **more)
            return (out * out_grad).sum(), (out, residual)

        return jax.jit(jax.grad(loss, has_aux=True))(floats)

    return [run(dot_product_attention), run(jax.nn.dot_product_attention, implementation="xla")]


def assert_close(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("name", _OPTIONS)
def test_values_and_gradients_agree_with_jax_nn(name: str):
    assert_close(*ours_and_theirs(_OPTIONS[name]))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_calls_with_other_kv_heads_agree_with_jax_nn(kv_heads: int):
    k, v = normal(B, S, kv_heads, H), normal(B, S, kv_heads, H)
    assert_close(*ours_and_theirs({"is_causal": True, "bias": _OPTIONS["bias"]["bias"]}, k=k, v=v))


def test_calls_without_a_batch_axis_agree_with_jax_nn():
    options = {"mask": MASK[:1], "is_causal": True}
    assert_close(*ours_and_theirs(options, Q[0], KEY[0], V[0], OUT_GRAD[0]))
    options = {"key_value_seq_lengths": np.array([5]), "bias": normal(1, N, T, S)}
    assert_close(*ours_and_theirs(options, Q[0], KEY[0], V[0], OUT_GRAD[0]))


def test_query_lengths_agree_except_for_the_lse_of_padding_rows():
    """Both calls give padding rows 0 and the same gradients; only ours gives their lse as -inf."""
    options = {"query_seq_lengths": np.array([4, 7]), "key_value_seq_lengths": np.array([9, 5])}
    (ours, (out, residual)), (theirs, (their_out, their_residual)) = ours_and_theirs(options)
    assert_close(out, their_out)
    assert_close(ours, theirs)
    assert_close(residual[1], their_residual[1])
    assert_close(residual[0, :4], their_residual[0, :4])
    assert np.all(np.asarray(residual[0, 4:]) == -np.inf)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_agrees_with_jax_nn(dtype: str):
    q, k, v = (jnp.asarray(x, dtype) for x in (Q, KEY, V))
    out, residual = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    expected, expected_residual = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, return_residual=True, implementation="xla"
    )
    assert (out.dtype, residual.dtype) == (expected.dtype, expected_residual.dtype) == (dtype,) * 2
    step = float(jnp.finfo(dtype).eps)
    for x, y in ((out, expected), (residual, expected_residual)):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=4 * step, atol=4 * step
        )


def test_rows_without_keys_are_zero_and_nan_in_padding_has_no_effect():
    """The differences from jax.nn that are intended."""
    nothing = np.zeros((1, 1, T, S), bool)
    assert not np.any(dot_product_attention(Q, KEY, V, mask=nothing))
    their_out = jax.nn.dot_product_attention(Q, KEY, V, mask=nothing, implementation="xla")
    assert np.any(their_out)
    k, v = KEY.copy(), V.copy()
    k[:, 5:], v[:, 5:] = np.nan, np.nan
    got = dot_product_attention(Q, k, v, key_value_seq_lengths=[5, 5])
    np.testing.assert_allclose(
        got, dot_product_attention(Q, k[:, :5], v[:, :5]), rtol=1e-5, atol=1e-6
    )
