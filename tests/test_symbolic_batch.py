"""An exported module may leave the batch open."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return dot_product_attention(q, k, v, is_causal=True)


def gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.grad(lambda q: attend(q, k, v).sum())(q)


@pytest.mark.parametrize("function", [attend, gradient])
def test_symbolic_batch(function: Any):
    (batch,) = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 6, 2, 8), jnp.float32)
    exported = jax.export.export(jax.jit(function))(shape, shape, shape)
    for b in (1, 3):
        x = jax.random.normal(jax.random.key(b), (b, 6, 2, 8))
        np.testing.assert_allclose(exported.call(x, x, x), function(x, x, x), atol=1e-6)
