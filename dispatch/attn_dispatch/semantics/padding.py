"""Shape changes that leave attention's meaning alone: head dims padded, dead rows trimmed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def pad_last(x: jax.Array, size: int) -> jax.Array:
    """x [..., D] with zeros appended to make it [..., size].

    Zero columns of query and key add nothing to a score, and those of value make zero columns of
    the output, so the padded call computes the same numbers.
    """
    missing = size - x.shape[-1]
    return x if missing == 0 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def prepend(x: jax.Array, count: int, *, axis: int, value: float) -> jax.Array:
    """x with `count` slices of `value` put before it along `axis`."""
    if count == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (count, 0)
    return jnp.pad(x, widths, constant_values=value)
