"""An axis of length zero gives the results that the formula gives, and no error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_dispatch import dot_product_attention

_DIMS = ("b", "t", "s", "n", "k", "h", "v")


def arrays(**dims: int) -> list[jax.Array]:
    b, t, s, n, k, h, v = ({name: 2 for name in _DIMS} | dims)[name] if False else (
        dims.get(name, 2) for name in _DIMS
    )
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, v))
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
