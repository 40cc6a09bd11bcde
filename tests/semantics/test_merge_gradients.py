"""Gradients of merging parts by lse; a part without keys has NaN that must not be read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, serving
from attn_dispatch.semantics.merge import merged_parts, shares

INF, NAN = np.inf, np.nan
LSE = np.array([[-INF, -INF, 1, 2, -200, 90], [-INF, 3, -INF, 1, 200, 91]], np.float32)
"""lse of two parts: no keys in either, keys in one, keys in both with close and distant values."""


def merged_by_definition(out: Any, lse: Any) -> tuple[Any, ...]:
    """Merged out [R, V] and lse [R] of rows with keys in both parts (out [2, R, V], lse [2, R])."""
    weights = jax.nn.softmax(lse, axis=0)
    return (weights[..., None] * out).sum(axis=0), jax.nn.logsumexp(lse, axis=0)


def by_merge(out: Any, lse: Any) -> tuple[Any, ...]:
    return serving.merge(out[0], lse[0], out[1], lse[1])


def by_parts(number: int) -> Any:
    """merged_parts with `number` parts, of which all but two have no keys."""

    def merged(out: Any, lse: Any) -> tuple[Any, ...]:
        without_keys = [(0, number - 2)]
        lse = jnp.pad(lse, [*without_keys, (0, 0)], constant_values=-INF)
        out = jnp.pad(out, [*without_keys, (0, 0), (0, 0)], constant_values=NAN)
        return tuple(x[0] for x in merged_parts(out[None], lse[None]))

    return merged


def by_merge_with_more(out: Any, lse: Any) -> tuple[Any, ...]:
    """serving.merge with two more parts, which have no keys."""
    nothing = jnp.full_like(out[0], NAN), jnp.full_like(lse[0], -INF)
    return serving.merge(*nothing, out[0], lse[0], *nothing, out[1], lse[1])


@pytest.mark.parametrize(
    "merged", [by_merge, by_merge_with_more, by_parts(2), by_parts(5), by_parts(20)]
)
def test_gradients_agree_with_the_definition_and_skip_parts_without_keys(merged: Any):
    rng = np.random.default_rng(0)
    out = rng.normal(size=(2, LSE.shape[1], 3)).astype(np.float32)
    out[LSE == -INF] = NAN
    cotangents = rng.normal(size=out.shape[1:]), rng.normal(size=LSE.shape[1:])
    cotangents = tuple(jnp.asarray(x, jnp.float32) for x in cotangents)
    results, pull = jax.vjp(merged, out, LSE)
    gradients = [np.asarray(x) for x in pull(cotangents)]
    tangents = jax.jvp(merged, (out, LSE), (np.ones_like(out), np.ones_like(LSE)))[1]
    assert all(np.isfinite(x).all() for x in (*gradients, *tangents))
    both = (LSE > -INF).all(axis=0)
    expected, pull = jax.vjp(merged_by_definition, out[:, both], LSE[:, both])
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x[both], y, rtol=1e-5)
    for x, y in zip(gradients, pull(tuple(x[both] for x in cotangents)), strict=True):
        np.testing.assert_allclose(x[:, both], y, rtol=2e-4, atol=1e-5)
    # If only one part has keys, it gets the whole gradient; if none has keys, no part gets any.
    for row, (with_keys, other) in {1: (1, 0), 2: (0, 1)}.items():
        np.testing.assert_allclose(gradients[0][with_keys, row], cotangents[0][row], rtol=1e-6)
        np.testing.assert_allclose(gradients[1][with_keys, row], cotangents[1][row], rtol=1e-6)
        assert not gradients[0][other, row].any() and not gradients[1][other, row]
    assert not gradients[0][:, 0].any() and not gradients[1][:, 0].any()


def test_shares_of_rows_without_keys_have_finite_gradients():
    lse = [jnp.asarray(x) for x in LSE]
    gradient = jax.grad(lambda lse: sum(x.sum() for x in shares(lse)[0]))(lse)
    assert all(np.isfinite(x).all() for x in gradient)


def test_nan_of_an_invalid_row_stays():
    out, lse = jnp.ones((2, 1, 3)), jnp.asarray([[NAN], [1.0]])
    results = by_merge(out, lse)
    assert all(np.isnan(x).all() for x in results)


def test_the_output_of_many_parts_is_rounded_once():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 64)).astype(np.float32)
    keys = rng.standard_normal((2, 2, 512, 4, 64)).astype(np.float32)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, *keys))
    exact = dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    parts = [
        dot_product_attention(q, k[:, i : i + 16], v[:, i : i + 16], return_lse=True)
        for i in range(0, 512, 16)
    ]
    (out, lse), *rest = parts
    at_once, _ = serving.merge(out, lse, *(x for part in rest for x in part))
    one_by_one, in_float32 = (out, lse), (out.astype(jnp.float32), lse)
    for part in rest:
        one_by_one = serving.merge(*one_by_one, *part)
        in_float32 = serving.merge(*in_float32, *part)
    assert at_once.dtype == jnp.bfloat16 and in_float32[0].dtype == jnp.float32
    errors = [
        abs(x.astype(jnp.float32) - exact).max() for x in (at_once, in_float32[0], one_by_one[0])
    ]
    assert errors[0] < 1e-3 and errors[1] < 1e-3 < 3e-3 < errors[2], errors
