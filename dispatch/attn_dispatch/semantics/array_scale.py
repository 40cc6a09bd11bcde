"""A scale that is an array (traced, or one number per head), folded into the query.

Kernels take the scale as one static number, so the query is multiplied by the rest:

    scale · q · k = number · (scale / number · q) · k

The number is 1/√H: a scale near it keeps the magnitude of the query and of its gradient, and a
scale equal to it changes nothing. The product is computed in float32 and rounded to the query's
dtype, an error that a static scale does not have. JAX differentiates it, also with respect to
scale.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from attn_dispatch.call.arguments import Arguments


def with_number_as_scale(arguments: Arguments) -> Arguments:
    """The arguments of a call; if scale is an array, with scale and query replaced.

    Raises:
      ValueError: if scale is not floating, or has neither shape [] nor [N]; the message has what
        was expected and what was given.
    """
    scale, query = arguments.scale, arguments.query
    if not _is_array(scale):
        return arguments
    arguments = replace(arguments, scale=None)
    if query is None or jnp.ndim(query) < 3:
        return arguments  # such a query is refused later, whatever the scale
    query, scale = jnp.asarray(query), jnp.asarray(scale)
    num_heads, head_dim = query.shape[-2:]
    if scale.shape not in ((), (num_heads,)):
        raise ValueError(
            f"scale: expected a number, or an array of shape [] or [{num_heads}] (one for each "
            f"head), got {list(scale.shape)}"
        )
    for name, x in (("scale", scale), ("query", query)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}: expected a floating dtype, got {x.dtype.name}; pass float32")
    wide = np.promote_types(query.dtype, np.float32)
    by_head = scale.astype(wide).reshape((1,) * (query.ndim - 2) + (-1, 1))
    factor = by_head * math.sqrt(max(head_dim, 1))
    return replace(arguments, query=(factor * query.astype(wide)).astype(query.dtype))


def _is_array(scale: ArrayLike | None) -> TypeGuard[jax.Array | np.ndarray]:
    """Whether the scale is traced or has axes. A known number stays static, which is exact."""
    return isinstance(scale, Tracer) or getattr(scale, "ndim", 0) > 0
