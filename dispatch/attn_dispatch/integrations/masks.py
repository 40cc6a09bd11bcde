"""Conversion of the frameworks' masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def as_bool(mask: ArrayLike) -> jax.Array:
    """A mask of bools or numbers as bools: True where it is not 0."""
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0
