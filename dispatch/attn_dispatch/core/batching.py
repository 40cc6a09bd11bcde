"""vmap of an attention call: the mapped axis is folded into the batch axis of every operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionOptions

_SHAREABLE = ("bias", "mask", "alibi_slopes", "sinks")
"""Operands whose batch axis may have length 1 in a call with more rows."""

Unfold = Callable[[Sequence[jax.Array]], list[jax.Array]]


def fold_batch(
    options: AttentionOptions, operands: Sequence[jax.Array], dims: Sequence[int | None]
) -> tuple[list[jax.Array], Unfold]:
    """Operands of one call equal to the mapped calls, and how to take its results apart again.

    Args:
      options: the call's options.
      operands: the arrays, in the order of options.operands.
      dims: the mapped axis of each, None where it has none.

    Returns:
      The operands, each with its batch axis `size` times as long (an operand that all rows share
      and that no gradient is asked of stays as it is), and a function that turns the results into
      arrays with a leading axis of that size.
    """
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    mapped = {
        name: _leading(x, dim, size)
        for name, x, dim in zip(options.operands, operands, dims, strict=True)
    }
    batch = mapped["query"].shape[1]
    # In dropout forward and backward must see the same shapes, to be computed by the same code.
    wanted = options.gradients or (options.partner.gradients if options.partner else ())
    is_mapped = dict(zip(options.operands, (dim is not None for dim in dims), strict=True))

    def fold(name: str) -> jax.Array:
        x = mapped[name]
        if name in _SHAREABLE and x.shape[1] == 1:
            if not is_mapped[name] and name not in wanted:
                return x[0]
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * x.shape[1], *x.shape[2:])

    folded = [fold(name) for name in options.operands]

    def unfold(results: Sequence[jax.Array]) -> list[jax.Array]:
        apart = [x.reshape(size, batch, *x.shape[1:]) for x in results]
        for i, name in enumerate(options.gradients):
            # The gradient of an operand that a call's rows shared is the sum over its rows.
            if mapped[name].shape[1] != apart[i].shape[1]:
                apart[i] = apart[i].sum(axis=1, keepdims=True)
        return apart

    return folded, unfold


def _leading(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """x with the mapped axis first, repeated along it where x has none."""
    if dim is None:
        return jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)
