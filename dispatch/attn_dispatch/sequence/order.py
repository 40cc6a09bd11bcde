"""Sequences put into the order in which devices hold their rows, and back."""

from __future__ import annotations

from typing import Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.static_arguments import check_positive_int
from attn_dispatch.choices import check_choice
from attn_dispatch.core.explicit_axes import with_auto_axes
from attn_dispatch.sequence.balancing import Balance

_Named = Literal["contiguous", "zigzag"]
Order = _Named | Balance
"""What device r of `parts` holds. "contiguous": part r of as many. "zigzag": chunks r and
2 · parts - 1 - r of 2 · parts chunks. Or what `balance` found for packed documents."""
_Array = TypeVar("_Array", np.ndarray, jax.Array)


def reorder(x: _Array, parts: int, *, order: Order = "zigzag", axis: int = 1) -> _Array:
    """Put what is in order into the order in which devices hold it, one device after the other.

    Shard the result's axis over the mesh axis of `parts` devices. NumPy arrays, in a data loader,
    give NumPy arrays. JAX arrays may be traced; the result is differentiable, and sharded like x
    under Explicit axes. Zigzag order sends each device's share to another device; an order by
    document gathers all of x, and is for the data loader.

    Args:
      x: any array with one entry per token along `axis`.
      parts: the number of devices along the mesh axis.
      order: "zigzag", "contiguous" (as x is), or what `balance` found. If that has an order
        for each of B rows, x's axis 0 is those rows.
      axis: the axis of tokens.

    Raises:
      ValueError: the length does not divide into chunks, or `order` is for other devices or shapes.
    """
    return _in_order(x, parts, order, axis, is_back=False)


def restore(x: _Array, parts: int, *, order: Order = "zigzag", axis: int = 1) -> _Array:
    """Undo `reorder`: put what devices hold, one device after the other, in order.

    Args:
      x: an array in the order in which the devices hold it.
      parts: the number of devices along the mesh axis.
      order: as it was given to `reorder`.
      axis: the axis of tokens.

    Raises:
      ValueError: as `reorder`.
    """
    return _in_order(x, parts, order, axis, is_back=True)


def positions(
    length: int,
    parts: int,
    *,
    order: Order = "zigzag",
    axis_name: str | None = None,
) -> np.ndarray | jax.Array:
    """The positions, int32, that the rows of a reordered sequence have in the whole one.

    Rotary embeddings need them. Positions that count from the start of each document are an input
    of your own: `reorder` them like the tokens.

    Args:
      length: the length of the whole sequence.
      parts: the number of devices along the mesh axis.
      order: as it was given to `reorder`.
      axis_name: inside a `shard_map` over this axis, the rows of the device alone.

    Returns:
      NumPy [length], or [B, length] for an order of each row; with axis_name a JAX array
      [length // parts] or [B, length // parts].

    Raises:
      ValueError: as `reorder`, or the axis does not have `parts` devices.
    """
    chunks, chunk = _chunks(check_positive_int("length", length), parts, order)
    if axis_name is None:
        return _tokens(chunks, chunk)
    if (devices := jax.lax.axis_size(axis_name)) != parts:
        raise ValueError(f"positions: expected {parts} devices along {axis_name}, got {devices}")
    # One number for each chunk is in the program, rather than one for each row.
    of_device = chunks.reshape(*chunks.shape[:-1], parts, -1)
    first = jnp.take(of_device, jax.lax.axis_index(axis_name), axis=-2)
    numbers = first[..., None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
    return numbers.reshape(*chunks.shape[:-1], length // parts)


def _chunks(length: int, parts: int, order: Order) -> tuple[np.ndarray, int]:
    """The chunks in the order in which the devices hold them, int32, and the tokens in each."""
    parts = check_positive_int("parts", parts)
    if isinstance(order, Balance):
        found = order.tokens.shape[-1]
        if (order.parts, found) != (parts, length):
            raise ValueError(
                f"order: expected an order of {length} tokens on {parts} devices, got one of "
                f"{found} tokens on {order.parts}"
            )
        return order.tokens, 1
    is_zigzag = check_choice("order", order, get_args(_Named)) == "zigzag"
    number = 2 * parts if is_zigzag else parts
    if length % number:
        raise ValueError(
            f"length: expected a multiple of {number} for {order} order on {parts} devices, got "
            f"{length}"
        )
    chunks = np.arange(number, dtype=np.int32)
    if is_zigzag:
        chunks = np.stack([chunks[:parts], chunks[: parts - 1 : -1]], axis=1).reshape(-1)
    return chunks, length // number


def _tokens(chunks: np.ndarray, chunk: int) -> np.ndarray:
    """The tokens, int32 [..., T], of chunks [..., chunks] in their order."""
    tokens = chunks[..., None] * chunk + np.arange(chunk, dtype=np.int32)
    return tokens.reshape(*chunks.shape[:-1], -1)


def _in_order(x: _Array, parts: int, order: Order, axis: int, *, is_back: bool) -> _Array:
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"axis: expected an axis of {list(x.shape)}, from {-x.ndim} to {x.ndim - 1}, got {axis}"
        )
    axis %= x.ndim
    chunks, chunk = _chunks(x.shape[axis], parts, order)
    if chunks.ndim == 2 and (axis == 0 or x.shape[0] != len(chunks)):
        raise ValueError(
            f"order: expected {len(chunks)} rows on axis 0, as the order has, and tokens on a "
            f"later axis, got an array {list(x.shape)} with tokens on axis {axis}"
        )
    if order == "contiguous":
        return x
    if is_back:
        chunks = cast("np.ndarray", np.argsort(chunks, axis=-1))
    # Chunks are moved, not tokens: few indices, and rows that are together stay together.
    shape = (*x.shape[:axis], chunks.shape[-1], chunk, *x.shape[axis + 1 :])
    if chunks.ndim == 2:
        chunks = chunks.reshape(len(chunks), *(1,) * (axis - 1), -1, *(1,) * (x.ndim - axis))
    if not isinstance(x, jax.Array):
        take = np.take if chunks.ndim == 1 else np.take_along_axis
        return take(x.reshape(shape), chunks, axis).reshape(x.shape)

    def moved(x: jax.Array) -> list[jax.Array]:
        whole = x.reshape(shape)
        if order == "zigzag":
            found = (_from_zigzag if is_back else _to_zigzag)(whole, axis)
        else:
            found = (jnp.take if chunks.ndim == 1 else jnp.take_along_axis)(whole, chunks, axis)
        return [found.reshape(x.shape)]

    return with_auto_axes(moved, [x])(x)[0]


# XLA computes these with permutes between devices. It would gather all of x on every device to take
# chunks by their numbers, or to concatenate them.


def _to_zigzag(chunks: jax.Array, axis: int) -> jax.Array:
    first, last = jnp.split(chunks, 2, axis)
    pairs = jnp.stack([first, jnp.flip(last, axis)], axis + 1)
    return pairs.reshape(chunks.shape)


def _from_zigzag(chunks: jax.Array, axis: int) -> jax.Array:
    shape, parts = chunks.shape, chunks.shape[axis] // 2
    pairs = chunks.reshape(*shape[:axis], parts, 2, *shape[axis + 1 :])
    first, last = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    before, after = [(0, 0)] * axis, [(0, 0)] * (chunks.ndim - axis - 1)
    first = jnp.pad(first, [*before, (0, parts), *after])
    last = jnp.pad(jnp.flip(last, axis), [*before, (parts, 0), *after])
    return jnp.where(jax.lax.broadcasted_iota(np.int32, shape, axis) < parts, first, last)
