"""The seed of a kernel that draws its dropout mask itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.typed_jax import wrapped_key


def kernel_seed(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """A 64-bit seed drawn from the call's dropout key, of which it has one: uint32 [2].

    The kernel counts rows and heads from 0 on every device. If a call is split over devices, each
    therefore needs a different key: with the same key all would draw the same mask.
    """
    key = wrapped_key(operands["dropout_key"][0], spec.meaning.dropout_impl)
    if "dropout_start" in operands:
        row, head = operands["dropout_start"][0]
        key = jax.random.fold_in(jax.random.fold_in(key, row), head)
    return jax.random.bits(key, (2,), jnp.uint32)
