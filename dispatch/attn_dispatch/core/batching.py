"""vmap of an attention call: the mapped axis is folded into the batch axis of every operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from attn_dispatch.call.leading import Leading
from attn_dispatch.call.spec import AttentionOptions, with_dropout_start

_SHAREABLE = ("bias", "mask", "window", "alibi_slopes", "sinks")
"""Operands whose batch axis may have length 1 in a call with more rows."""

Unfold = Callable[[Sequence[jax.Array]], list[jax.Array]]


def fold_batch(
    options: AttentionOptions, operands: Sequence[jax.Array], dims: Sequence[int | None]
) -> tuple[AttentionOptions, list[jax.Array], Unfold]:
    """One call equal to the mapped calls, and how to take its results apart again.

    Args:
      options: the call's options.
      operands: the arrays, in the order of options.operands.
      dims: the mapped axis of each, None where it has none.

    Returns:
      The options; the operands, each with its batch axis `size` times as long (an operand that all
      rows share and that no gradient is asked of stays as it is); and a function that turns the
      results into arrays with a leading axis of that size.
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

    leading = Leading.of((size, batch), (x for x in mapped.values() if x.shape[1] == batch))
    if not leading.keeps_order and "dropout_key" in mapped:
        options, mapped = with_dropout_start(options), mapped | _dropout_by_row(mapped, batch)

    def fold(name: str) -> jax.Array:
        x = mapped[name]
        if name in _SHAREABLE and x.shape[1] == 1:
            if not is_mapped[name] and name not in wanted:
                return x[0]
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        if x.shape[1] != batch:  # dropout's, for several rows each
            return x.reshape(size * x.shape[1], *x.shape[2:])
        return leading.merged(x)

    folded = [fold(name) for name in options.operands]

    def unfold(results: Sequence[jax.Array]) -> list[jax.Array]:
        apart = [leading.split(x) for x in results]
        for i, name in enumerate(options.gradients):
            # The gradient of an operand that a call's rows shared is the sum over its rows.
            if mapped[name].shape[1] != apart[i].shape[1]:
                apart[i] = apart[i].sum(axis=1, keepdims=True)
        return apart

    return options, folded, unfold


def _dropout_by_row(mapped: Mapping[str, jax.Array], batch: int) -> dict[str, jax.Array]:
    """dropout_key and dropout_start with one of each for every row, that may then be moved."""
    keys = mapped["dropout_key"]
    size, number, _ = keys.shape
    starts = mapped.get("dropout_start", jnp.zeros((size, number, 2), jnp.int32))
    rows = jnp.arange(batch, dtype=jnp.int32) % (batch // number)
    further = jnp.stack([rows, jnp.zeros_like(rows)], axis=1)
    return {
        "dropout_key": jnp.repeat(keys, batch // number, axis=1),
        "dropout_start": jnp.repeat(starts, batch // number, axis=1) + further,
    }


def _leading(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """x with the mapped axis first, repeated along it where x has none."""
    if dim is None:
        return jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)
