"""Arrays for the tests of mods, and gradients along an uneven direction."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, N, K, H = 2, 21, 26, 4, 2, 8
_rng = np.random.default_rng(0)
Q, KEY, V = (
    jnp.asarray(_rng.standard_normal(x), jnp.float32)
    for x in ((B, T, N, H), (B, S, K, H), (B, S, K, H))
)
OUT_GRAD = jnp.asarray(_rng.standard_normal((B, T, N, H)), jnp.float32)
SLOPES = jnp.asarray(_rng.random(N), jnp.float32)


def gradients(call, *arrays: Any) -> tuple[jax.Array, ...]:
    numbers = tuple(range(len(arrays)))
    return jax.jit(jax.grad(lambda *x: (call(*x) * OUT_GRAD).sum(), numbers))(*arrays)
