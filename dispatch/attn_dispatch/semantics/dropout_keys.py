"""The dropout key of a kernel that draws its mask itself, from one seed."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.typed_jax import wrapped_key


def first_dropout_key(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The JAX key that seeds the kernel; a call has one.

    The kernel counts rows and heads from 0 on every device. If a call is split over devices, each
    therefore needs a different key: with the same key all would draw the same mask.
    """
    key = wrapped_key(operands["dropout_key"][0], spec.meaning.dropout_impl)
    if "dropout_start" not in operands:
        return key
    row, head = operands["dropout_start"][0]
    return jax.random.fold_in(jax.random.fold_in(key, row), head)
