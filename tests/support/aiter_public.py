"""Operands and gradients of public calls that the emulated AITER computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import (
    dot_product_attention,
)

SLOPES = jnp.linspace(0.1, 1, 4)


def arrays(t: int = 24, s: int = 40, b: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((b, t, 4, 16), (b, s, 2, 16), (b, s, 2, 16))
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def value_and_gradients(*qkv: jax.Array, **options: Any) -> list[np.ndarray]:
    def call(*qkv):
        return dot_product_attention(*qkv, **options)

    out, pull = jax.vjp(jax.jit(call), *qkv)
    return [np.asarray(x, np.float32) for x in (out, *pull(out))]


def assert_close(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=0.05, rtol=0.02)
