"""Scales of 0 and below, for kernels that take a row's maximum before they multiply by the scale.

With a negative scale such a kernel would take the minimum for the maximum, and 0 · -inf is NaN. A
positive scale and another query give the same scores, exactly:

    scale · q · k = |scale| · (-q) · k        0 · q · k = 1 · 0 · k

The query's gradient is that of the other query times -1 or 0; those of key and value are unchanged.
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
    """The query that goes with `positive_scale`. Applied to its gradient, gives the query's."""
    if spec.meaning.scale > 0:
        return query
    return -query if spec.meaning.scale < 0 else jnp.zeros_like(query)


def is_out_of_range(spec: AttentionSpec) -> bool:
    """Whether the scale is too small or too large for kernels, which multiply in float32."""
    return not is_normal(positive_scale(spec))


def is_normal(scale: float) -> bool:
    """Whether the scale is a normal float32 number even after multiplication by log2(e).

    A kernel that flushes it to 0 or infinity would return NaN.
    """
    return _SMALLEST <= scale <= _LARGEST
