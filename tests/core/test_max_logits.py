"""`return_max_logits`: the largest score of each query, over the keys it attends to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, ragged_dot_product_attention, rewrites

T, S = 5, 7
_rng = np.random.default_rng(0)
Q = _rng.standard_normal((2, T, 4, 8), np.float32)
K = _rng.standard_normal((2, S, 2, 8), np.float32)
V = _rng.standard_normal((2, S, 2, 6), np.float32)
BIAS = _rng.standard_normal((2, 4, T, S), np.float32)


def scores(scale: float = 8**-0.5) -> np.ndarray:
    """scale · q · k, [B, N, T, S]."""
    return scale * np.einsum("btnh,bsnh->bnts", Q, np.repeat(K, 2, axis=2))


def row_maxima(masked: np.ndarray) -> np.ndarray:
    """Row maxima [B, T, N] of scores [B, N, T, S]."""
    return masked.max(axis=-1).swapaxes(1, 2)


_DISTANCE = abs(np.arange(T)[:, None] - np.arange(S))
_CASES: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "plain": ({}, scores()),
    "scale": ({"scale": -2.0}, scores(-2.0)),
    "soft_cap_then_bias": (
        {"logits_soft_cap": 0.7, "bias": BIAS}, 0.7 * np.tanh(scores() / 0.7) + BIAS
    ),
    "alibi": ({"alibi_slopes": np.ones(4, np.float32)}, scores() - _DISTANCE),
    "causal": ({"is_causal": True}, np.where(np.tri(T, S, dtype=bool), scores(), -np.inf)),
    "sink_is_left_out": ({"sinks": np.full(4, 50.0, np.float32)}, scores()),
    "dropout_is_after_the_softmax": (
        {"dropout_rate": 0.9, "dropout_key": jax.random.key(0)}, scores()
    ),
    "rows_without_keys": (
        {"query_seq_lengths": [2, 0]},
        np.where(np.arange(T)[:, None] < np.array([2, 0])[:, None, None, None], scores(), -np.inf),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _CASES)
def test_row_maxima_agree_with_numpy(name: str):
    options, expected = _CASES[name]
    out, maxima = dot_product_attention(Q, K, V, **options, return_max_logits=True)
    assert (maxima.shape, maxima.dtype) == ((2, T, 4), jnp.float32)
    np.testing.assert_allclose(maxima, row_maxima(expected), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out, dot_product_attention(Q, K, V, **options))


def test_max_logits_come_last():
    out, residual, lse, maxima = dot_product_attention(
        Q, K, V, return_residual=True, return_lse=True, return_max_logits=True
    )
    expected = dot_product_attention(Q, K, V, return_residual=True, return_lse=True)
    for x, y in zip((out, residual, lse), expected, strict=True):
        np.testing.assert_array_equal(x, y)
    assert (np.asarray(maxima) <= np.asarray(lse)).all()
    with_lse = dot_product_attention(Q, K, V, return_lse=True, return_max_logits=True)
    np.testing.assert_array_equal(with_lse[1], lse)
    np.testing.assert_array_equal(with_lse[2], maxima)


def test_row_maxima_of_packed_sequences_and_of_rows_past_them():
    cu_q, cu_kv = np.array([0, 2, 4]), np.array([0, 3, 6])
    _, lse, maxima = ragged_dot_product_attention(
        Q[0], K[0], V[0], cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=3, max_seqlen_kv=4,
        return_lse=True, return_max_logits=True,
    )  # fmt: skip
    assert lse.shape == maxima.shape == (T, 4)
    same = np.digitize(np.arange(T), cu_q[1:])[:, None] == np.digitize(np.arange(S), cu_kv[1:])
    same[4:] = False
    expected = row_maxima(np.where(same, scores(), -np.inf))[0]
    np.testing.assert_allclose(maxima, expected, rtol=1e-5, atol=1e-6)


def test_row_maximum_has_no_gradient_and_changes_no_other():
    def results(q):
        return dot_product_attention(q, K, V, return_lse=True, return_max_logits=True)

    assert not np.any(jax.grad(lambda q: results(q)[2].sum())(Q))
    got = jax.grad(lambda q: results(q)[0].sum() + results(q)[1].sum() + results(q)[2].sum())(Q)
    plain = jax.grad(lambda q: results(q)[0].sum() + results(q)[1].sum())(Q)
    np.testing.assert_array_equal(got, plain)
    (out, maxima), pull = jax.vjp(
        lambda q: dot_product_attention(q, K, V, return_max_logits=True), jnp.asarray(Q)
    )
    (gradient,) = pull((jnp.ones_like(out), jnp.full_like(maxima, jnp.nan)))
    assert np.isfinite(gradient).all()


def test_row_maxima_in_float64():
    with jax.enable_x64(True):
        q, k, v = (x.astype(np.float64) for x in (Q, K, V))
        _, maxima = dot_product_attention(q, k, v, return_max_logits=True)
        assert maxima.dtype == jnp.float64
        expected = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2)) * 8**-0.5
        np.testing.assert_allclose(maxima, row_maxima(expected), rtol=1e-12)


def test_row_maxima_without_keys_are_minus_infinity():
    out, maxima = dot_product_attention(Q, K[:, :0], V[:, :0], return_max_logits=True)
    assert not out.any() and (maxima == -np.inf).all()


def test_explain_shows_the_rewrite_of_the_row_maximum():
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    with rewrites(False):
        refused = explain(q, q, q, return_max_logits=True, target="gfx942")
    assert refused.chosen_forward == "xla"
    explanation = explain(q, q, q, return_max_logits=True, target="gfx942")
    assert "rewritten: the row maximum: by XLA, beside the kernel" in str(explanation)
    assert "because:   the row maximum: not run through AITER" in str(explanation)
    assert explanation.chosen_forward == "aiter"
    assert explanation.chosen_backward == "aiter"  # lse has no gradient here
