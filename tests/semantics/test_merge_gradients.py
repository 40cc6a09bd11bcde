"""Gradients of merging parts by lse; a part without keys has NaN that must not be read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import serving
from attn_dispatch.semantics.merge import merged_parts, shares

INF, NAN = np.inf, np.nan
LSE = np.array([[-INF, -INF, 1, 2, -200, 90], [-INF, 3, -INF, 1, 200, 91]], np.float32)
"""lse of two parts: no keys in either, keys in one, keys in both with close and distant values."""


def merged_by_definition(out: Any, lse: Any) -> tuple[Any, Any]:
    """Merged out [R, V] and lse [R] of rows with keys in both parts (out [2, R, V], lse [2, R])."""
    weights = jax.nn.softmax(lse, axis=0)
    return (weights[..., None] * out).sum(axis=0), jax.nn.logsumexp(lse, axis=0)


def by_merge(out: Any, lse: Any) -> tuple[Any, Any]:
    return serving.merge(out[0], lse[0], out[1], lse[1])


def by_parts(number: int) -> Any:
    """merged_parts with `number` parts, of which all but two have no keys."""

    def merged(out: Any, lse: Any) -> tuple[Any, Any]:
        without_keys = [(0, number - 2)]
        lse = jnp.pad(lse, [*without_keys, (0, 0)], constant_values=-INF)
        out = jnp.pad(out, [*without_keys, (0, 0), (0, 0)], constant_values=NAN)
        return tuple(x[0] for x in merged_parts(out[None], lse[None]))

    return merged


@pytest.mark.parametrize("merged", [by_merge, by_parts(2), by_parts(5), by_parts(20)])
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
