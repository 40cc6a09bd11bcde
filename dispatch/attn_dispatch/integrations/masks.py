"""Conversion of the frameworks' masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def as_bool(mask: Any) -> jax.Array:
    """A mask of bools or numbers as bools: True where it is not 0."""
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0
