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
