"""Which keys a query may attend, formed for a few query rows at a time."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.positions import Positions


def take_rows(x: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """Query rows start … start + size - 1 of x, [1|B, 1|N, 1|T, …]; a broadcast T stays 1."""
    if x.shape[2] in (1, size):
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis=2)


def allowed(
    spec: AttentionSpec,
    operands: Mapping[str, jax.Array],
    positions: Positions,
    start: jax.Array | int,
    size: int,
) -> jax.Array | None:
    """Whether each of the query rows start … start + size - 1 may attend each key.

    `positions` are those of the rows. Returns bool [1|B, 1|N, 1|size, 1|S], or None where
    every pair is allowed.
    """
    conditions: list[jax.Array] = []
    if positions.query_ids is not None and positions.key_ids is not None:
        query_ids = positions.query_ids[:, None, :, None]
        conditions += [query_ids == positions.key_ids[:, None, None, :], query_ids > 0]
    if positions.diagonal is not None and positions.key_positions is not None:
        diagonal = positions.diagonal[:, None, :, None]
        keys = positions.key_positions[:, None, None, :]
        left, right = spec.band
        if left is not None:
            conditions.append(keys >= diagonal - left)
        if right is not None:
            conditions.append(keys <= diagonal + right)
    if spec.has("mask"):
        conditions.append(take_rows(operands["mask"], start, size))
    if not conditions:
        return None
    result = conditions[0]
    for condition in conditions[1:]:
        result = result & condition
    return result
