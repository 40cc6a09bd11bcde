"""The mask of a call, which keys each query may attend to, for a block of queries at a time."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.positions import Positions


def allowed(
    spec: AttentionSpec,
    operands: Mapping[str, jax.Array],
    positions: Positions,
) -> jax.Array | None:
    """Whether each query may attend to each key.

    For a block, operands and positions are cut to its batch rows, heads and queries. Returns bool
    [1|B, 1|N, 1|T, 1|S], or None where every pair is allowed.
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
        if spec.has("window"):
            # The cut, which changes nothing, keeps sums in int32.
            sides = jnp.minimum(operands["window"], spec.widest_side)[:, :, None, None, None]
            conditions += [keys >= diagonal - sides[:, 0], keys <= diagonal + sides[:, 1]]
            conditions.append((sides >= 0).all(axis=1))
    if spec.has("mask"):
        conditions.append(operands["mask"])
    program = spec.meaning.mask_mod
    if program is not None:
        assert positions.indices is not None
        arrays = mods.arrays_of("mask_mod", program, operands)
        conditions.append(mods.may_attend(program, positions.indices, arrays))
    if not conditions:
        return None
    result = conditions[0]
    for condition in conditions[1:]:
        result = result & condition
    return result
