"""Score_mods for tests of kernels that are compiled with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GAINS = jnp.asarray([0.5, -1.0, 2.0, 0.25, 1.5, -0.5, 1.0, 0.75], jnp.float32)
"""A number for each head."""
DEPTHS = jnp.asarray([3, 1, 4, 1, 5, 9, 2, 6], jnp.int32)


def by_head_and_place(
    score: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array
) -> jax.Array:
    """A score_mod that reads two arrays and all indices, and that bends scores."""
    bent = jnp.where(t - s > DEPTHS[b % 8], jnp.maximum(score, 0.5 * score), jnp.tanh(score))
    return bent + GAINS[n] * jnp.minimum(jnp.abs(t - s), 9).astype(jnp.float32) / 9


def large_past_the_end(
    score: jax.Array, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array
) -> jax.Array:
    """A score_mod whose weights overflow where kernels compute rows past the last one: a score of 0
    gives infinity there, and 0 · infinity is NaN."""
    return jnp.where(score == 0, 1e4, score)
