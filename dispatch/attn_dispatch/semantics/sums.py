"""The gradient of a broadcast array: a sum over the axes it was broadcast along."""

from __future__ import annotations

import jax
import numpy as np


def sum_like(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x summed, in float32 or wider, over the axes of length 1 in `shape`, which are kept."""
    axes = tuple(i for i, size in enumerate(shape) if size == 1)
    if not axes:
        return x
    return x.astype(np.promote_types(x.dtype, np.float32)).sum(axis=axes, keepdims=True)
