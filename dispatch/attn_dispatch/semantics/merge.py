"""Attention to two sets of keys from attention to each: what lse is for."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merged(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """out and lse over the keys of both: out [..., V] and lse [...], of a's dtypes.

        lse = log(exp(lse_a) + exp(lse_b))
        out = out_a · exp(lse_a - lse) + out_b · exp(lse_b - lse)

    A row without keys, whose lse is -inf, is left out, whatever stands in it.

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
    top = lse.max(axis=1, keepdims=True)
    weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))
    total = weight.sum(axis=1, keepdims=True)
    share = (weight / jnp.where(total == 0, 1, total))[..., None]
    out = jnp.where(share > 0, out * share, 0).sum(axis=1)
    return out, (top + jnp.log(total))[:, 0]
