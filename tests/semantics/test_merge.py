"""Drawn parts of keys merged, beside one softmax over all of them in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import sequence, serving
from tests.support.attention_in_numpy import softmax

ROWS, WIDTH = 12, 5
DEAD = (0, 7)
"""Rows without keys in any part."""


def of_scores(scores: np.ndarray, v: np.ndarray, g: np.ndarray, g_lse: np.ndarray) -> np.ndarray:
    """The gradient of the scores, of softmax(scores) v and of lse."""
    weights, _ = softmax(scores)
    to_weights = g @ v.T
    mean = (weights * to_weights).sum(axis=1)
    return weights * (to_weights - mean[:, None] + g_lse[:, None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parts", [1, 2, 3, 8, 20])
def test_drawn_parts_are_one_softmax(parts: int, dtype: str):
    rng = np.random.default_rng(parts)
    keys = rng.integers(1, 6, parts)
    scores = rng.normal(0, 4, (ROWS, keys.sum()))
    scores[rng.random(scores.shape) < 0.5] = -np.inf  # some rows have no keys in some parts
    scores[list(DEAD)] = -np.inf
    v, ends = rng.normal(size=(keys.sum(), WIDTH)), np.cumsum(keys)[:-1]
    of_parts = list(zip(np.split(scores, ends, axis=1), np.split(v, ends), strict=True))
    given: list[jax.Array] = []
    for part, values in of_parts:
        weights, lse = softmax(part)
        out = np.where(np.isinf(lse)[:, None], np.nan, weights @ values)
        given += [jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)]

    (out, lse), pull = jax.vjp(sequence.merge, *given)
    g, g_lse = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=ROWS)
    g, g_lse = jnp.asarray(g, dtype), jnp.asarray(g_lse, jnp.float32)
    gradients = [np.asarray(x, np.float64) for x in pull((g, g_lse))]

    assert out.dtype == dtype and lse.dtype == jnp.float32
    weights, expected_lse = softmax(scores)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), weights @ v, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert (np.asarray(lse)[list(DEAD)] == -np.inf).all() and not out[jnp.array(DEAD)].any()
    assert all(np.isfinite(x).all() and not x[list(DEAD)].any() for x in gradients)
    # Through each part's own softmax the gradients are those of the scores in one softmax.
    got = [
        of_scores(part, values, *x)
        for (part, values), *x in zip(of_parts, gradients[::2], gradients[1::2], strict=True)
    ]
    expected = of_scores(scores, v, np.asarray(g, np.float64), np.asarray(g_lse, np.float64))
    np.testing.assert_allclose(np.concatenate(got, axis=1), expected, atol=4 * tolerance)


@pytest.mark.parametrize("of_lse", [lambda x: x, jnp.exp, jnp.square], ids=["lse", "exp", "square"])
def test_rows_without_keys_never_give_nan(of_lse):
    """Even if the loss is infinite there, or the out of such rows is NaN."""
    out, lse = jnp.full((4, 3), jnp.nan, jnp.bfloat16), jnp.full(4, -jnp.inf)

    def loss(*parts: jax.Array) -> jax.Array:
        merged, lse = serving.merge(*parts)
        return merged.sum(dtype=jnp.float32) + of_lse(lse).sum()

    for gradient in jax.jit(jax.grad(loss, range(6)))(out, lse, out, lse, out, lse):
        assert not gradient.any()  # NaN is true
    values, pull = jax.vjp(serving.merge, out, lse, out, lse)
    nan = tuple(jnp.full_like(x, jnp.nan) for x in values)
    assert not any(x.any() for x in pull(nan))


def test_serving_has_the_same_function():
    assert serving.merge is sequence.merge
