"""Rows and keys in contiguous and zigzag order, and the way from one to the other.

Of 2 · P chunks, device r holds chunks 2r and 2r + 1 in contiguous order; in zigzag order, chunks r
and 2P - 1 - r. The even chunks are sent to different devices, and so are the odd ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.core.context.device_call import Arrays, DeviceCall, half


def to_zigzag(
    device: DeviceCall, arrays: Mapping[str, jax.Array], axes: Mapping[str, int]
) -> Arrays:
    """Arrays in zigzag order, from contiguous ones.

    Args:
      device: the device's call.
      arrays: the arrays.
      axes: the axis of rows or keys of each of them.
    """
    even, odd = (
        device.send(half(arrays, axes, i), pairs) for i, pairs in enumerate(_pairs(device))
    )
    return {x: _ordered(device, even[x], odd[x], axes[x]) for x in arrays}


def to_contiguous(
    device: DeviceCall, arrays: Mapping[str, jax.Array], axes: Mapping[str, int]
) -> Arrays:
    """The inverse of `to_zigzag`."""
    first, second = half(arrays, axes, 0), half(arrays, axes, 1)
    is_even = device.number % 2 == 0
    even = {x: jnp.where(is_even, first[x], second[x]) for x in arrays}
    odd = {x: jnp.where(is_even, second[x], first[x]) for x in arrays}
    back = [
        device.send(x, [(b, a) for a, b in pairs])
        for x, pairs in zip((even, odd), _pairs(device), strict=True)
    ]
    return {x: jnp.concatenate([y[x] for y in back], axes[x]) for x in arrays}


def _pairs(device: DeviceCall) -> list[list[tuple[int, int]]]:
    """Where the even chunks of all devices go, and where the odd ones do."""
    devices = device.context.devices
    return [
        [(i, min(2 * i + which, 2 * devices - 1 - 2 * i - which)) for i in range(devices)]
        for which in (0, 1)
    ]


def _ordered(device: DeviceCall, even: jax.Array, odd: jax.Array, axis: int) -> jax.Array:
    """Both chunks of this device in ascending order: on an even device the even one is first."""
    is_even = device.number % 2 == 0
    first, second = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
    return jnp.concatenate([first, second], axis)


def in_sequence(x: jax.Array, axis: int, devices: int) -> jax.Array:
    """What all devices hold in zigzag order, one after the other, in the order of the sequence."""
    shape = x.shape
    x = x.reshape(*shape[:axis], devices, 2, -1, *shape[axis + 1 :])
    first, second = (lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in (0, 1))
    whole = jnp.concatenate([first, jnp.flip(second, axis)], axis)
    return whole.reshape(shape)


def in_zigzag(x: jax.Array, axis: int, devices: int) -> jax.Array:
    """The inverse of `in_sequence`."""
    shape = x.shape
    x = x.reshape(*shape[:axis], 2 * devices, -1, *shape[axis + 1 :])
    first = lax.slice_in_dim(x, 0, devices, axis=axis)
    second = jnp.flip(lax.slice_in_dim(x, devices, 2 * devices, axis=axis), axis)
    return jnp.stack([first, second], axis + 1).reshape(shape)
