"""The dropout key of a kernel that draws its mask by itself, from one seed."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from attn_dispatch.call.spec import AttentionSpec


def first_dropout_key(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The JAX key that seeds the kernel, which has one for each call.

    Such a kernel counts rows and heads from its own first: devices that share out a call would
    all draw one mask, if each did not draw from a key of its own.
    """
    key = jax.random.wrap_key_data(operands["dropout_key"][0], impl=spec.meaning.dropout_impl)
    if "dropout_start" not in operands:
        return key
    row, head = operands["dropout_start"][0]
    return jax.random.fold_in(jax.random.fold_in(key, row), head)
