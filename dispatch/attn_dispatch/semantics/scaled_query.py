"""Scales of 0 and below, for kernels that take a row's maximum before they multiply by the scale.

There the maximum of a negative scale's scores is their minimum, and 0 · -inf is NaN. What such a
call means is also said by a positive scale and another query, without an error:

    scale · q · k = |scale| · (-q) · k        0 · q · k = 1 · 0 · k

The query's gradient is that of the other query, times -1 or 0; key's and value's are their own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec

_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


def positive_scale(spec: AttentionSpec) -> float:
    """The scale that goes with `scaled_query`."""
    return abs(spec.meaning.scale) or 1.0


def scaled_query(spec: AttentionSpec, query: jax.Array) -> jax.Array:
    """The query that goes with `positive_scale`; of its gradient makes the query's own."""
    if spec.meaning.scale > 0:
        return query
    return -query if spec.meaning.scale < 0 else jnp.zeros_like(query)


def is_out_of_range(spec: AttentionSpec) -> bool:
    """Whether the scale is a number that kernels do not multiply by right."""
    return not is_normal(positive_scale(spec))


def is_normal(scale: float) -> bool:
    """Whether float32 holds it as a normal number, with room for a factor of log2(e).

    A kernel that flushes it to 0, or to infinity, makes NaN of it.
    """
    return _SMALLEST <= scale <= _LARGEST
