"""Attention to two sets of keys from attention to each: what lse is for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

_MOST_ONE_BY_ONE = 16
"""Parts that are added up one after the other, in one kernel; sums over an axis are one each."""


def merged(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys, a and b, from the out and lse of each.

    out is [..., V] and lse [...]; the results have the dtypes of a:

        lse = log(exp(lse_a) + exp(lse_b))
        out = out_a · exp(lse_a - lse) + out_b · exp(lse_b - lse)

    A row without keys, whose lse is -inf, does not count, whatever its out is.

    Raises:
      ValueError: shapes that do not go together.
    """
    shapes = [jnp.shape(x) for x in (out_a, lse_a, out_b, lse_b)]
    rows = shapes[0][:-1]
    if shapes != [shapes[0], rows, shapes[0], rows]:
        raise ValueError(
            f"merge: expected out {list(shapes[0])} and lse {list(rows)} of both, got "
            f"{', '.join(str(list(x)) for x in shapes)}"
        )
    lse = jnp.logaddexp(lse_a, lse_b)
    is_dead = lse == -jnp.inf

    def share(out: jax.Array, part: jax.Array) -> jax.Array:
        weight = jnp.exp(part - jnp.where(is_dead, 0, lse))[..., None]
        return jnp.where(weight == 0, 0, out.astype(lse.dtype) * weight)

    return (share(out_a, lse_a) + share(out_b, lse_b)).astype(out_a.dtype), lse


def merged_parts(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of all parts along axis 1: out [B, parts, ..., V] and lse [B, parts, ...].

    out is of lse's dtype then. What has no keys in any part is 0 and -inf.
    """
    if (parts := lse.shape[1]) <= _MOST_ONE_BY_ONE:
        each, lse = shares([lse[:, i] for i in range(parts)])
        found = (
            jnp.where(x > 0, out[:, i] * x, 0) for i, x in enumerate(y[..., None] for y in each)
        )
        return functools.reduce(jnp.add, found), lse
    top = lse.max(axis=1, keepdims=True)
    weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))
    total = weight.sum(axis=1, keepdims=True)
    share = (weight / jnp.where(total == 0, 1, total))[..., None]
    out = jnp.where(share > 0, out * share, 0).sum(axis=1)
    return out, (top + jnp.log(total))[:, 0]


def shares(lse: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Of each of a few parts, of which this is lse or a single score: its share of the softmax over
    all of them; and their lse. Said part by part, which XLA makes one kernel of.

    Without keys in any part the shares are 0 and lse is -inf.
    """
    top = functools.reduce(jnp.maximum, lse)
    weights = [jnp.exp(x - jnp.where(top == -jnp.inf, 0, top)) for x in lse]
    total = functools.reduce(jnp.add, weights)
    return [x / jnp.where(total == 0, 1, total) for x in weights], top + jnp.log(total)
