"""Attention to two sets of keys from attention to each: what lse is for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

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
    each, lse = shares([lse_a, lse_b])
    parts = (
        _weighted(out.astype(lse.dtype), x) for out, x in zip((out_a, out_b), each, strict=True)
    )
    return functools.reduce(jnp.add, parts).astype(out_a.dtype), lse


def merged_parts(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of all parts along axis 1: out [B, parts, ..., V] and lse [B, parts, ...].

    out is of lse's dtype then. What has no keys in any part is 0 and -inf.
    """
    if (parts := lse.shape[1]) <= _MOST_ONE_BY_ONE:
        each, lse = shares([lse[:, i] for i in range(parts)])
        return functools.reduce(jnp.add, (_weighted(out[:, i], x) for i, x in enumerate(each))), lse
    top = lse.max(axis=1, keepdims=True)
    weight = _weight(lse, top)
    total = weight.sum(axis=1, keepdims=True)
    out = _weighted(out, weight / jnp.where(total == 0, 1, total)).sum(axis=1)
    return out, _lse(top, total)[:, 0]


def shares(lse: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """The share of each of a few parts in the softmax over all of them, and the lse of all.

    `lse` has the lse of each part, or a single score. It is written part by part, which XLA makes
    one kernel of. Without keys in any part the shares are 0 and lse is -inf; their gradients are 0.
    """
    top = functools.reduce(jnp.maximum, lse)
    weights = [_weight(x, top) for x in lse]
    total = functools.reduce(jnp.add, weights)
    return [x / jnp.where(total == 0, 1, total) for x in weights], _lse(top, total)


# A derivative is multiplied by 0 where a result is replaced, and 0 · inf and 0 · NaN are NaN: so
# what would be -inf or NaN is replaced before it is computed with.


def _weight(lse: jax.Array, top: jax.Array) -> jax.Array:
    """exp(lse - top), 0 for a part without keys. The results do not depend on what `top` is."""
    is_dead = lse == -jnp.inf
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    return jnp.where(is_dead, 0, jnp.exp(jnp.where(is_dead, 0, lse) - top))


def _lse(top: jax.Array, total: jax.Array) -> jax.Array:
    is_dead = total == 0
    lse = lax.stop_gradient(top) + jnp.log(jnp.where(is_dead, 1, total))
    return jnp.where(is_dead, -jnp.inf, lse)


def _weighted(out: jax.Array, share: jax.Array) -> jax.Array:
    """out [..., V] times share [...]; 0 where that is 0, whatever out is."""
    share = share[..., None]
    return jnp.where(share == 0, 0, out) * share
