"""Comparison of the results of two ways to compute a call, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.typed_jax import relative_step

_ROUNDINGS = 4
"""The difference allowed between rows, in units in the last place of the call's dtype. Kernels
round probabilities and gradients of scores to that dtype, and then each result."""

_LEAST = 1e-3
"""The least difference allowed: for lse, which is summed in float32, and for rows of calls in more
than 16 bits, whose products implementations may round differently."""


def differing(
    spec: AttentionSpec, got: Sequence[jax.Array], expected: Sequence[jax.Array]
) -> tuple[str, ...]:
    """The names of the results that differ."""
    tolerance = max(_ROUNDINGS * relative_step(spec.dtype), _LEAST)
    found: list[str] = []
    for name, a, b in zip(spec.result_names, got, expected, strict=True):
        if name in ("lse", "row_max"):
            differs = cast("jax.Array", _numbers_differ(a, b))
        else:
            differs = cast("jax.Array", _rows_differ(a, b, tolerance))
        if differs:
            found.append(name)
    return tuple(found)


@jax.jit
def _numbers_differ(a: jax.Array, b: jax.Array) -> jax.Array:
    difference = jnp.where(_alike(a, b), 0, jnp.abs(a - b))
    size = jnp.where(jnp.isfinite(b), jnp.abs(b), 0)
    return ~jnp.all(difference <= _LEAST * jnp.maximum(1, size))


@partial(jax.jit, static_argnames="tolerance")
def _rows_differ(a: jax.Array, b: jax.Array, tolerance: float) -> jax.Array:
    """Whether the error of any row exceeds `tolerance` times its length, or the usual length.

    Rows are compared one by one because a tile that a kernel skipped is a small part of the whole.
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    off = _length(jnp.where(_alike(a, b), 0, a - b))
    length = _length(jnp.where(jnp.isfinite(b), b, 0))
    usual = jnp.sqrt(jnp.mean(jnp.square(length)))
    return ~jnp.all(off <= tolerance * jnp.maximum(length, usual))


def _alike(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a == b) | (jnp.isnan(a) & jnp.isnan(b))


def _length(rows: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(rows), axis=-1))
