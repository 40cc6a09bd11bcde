"""A causal window: every device receives only the last keys of the device before it.

The window must not reach further back than that device. Rows and keys are contiguous. The first
device receives nothing: with segment ids, these are 0 there and hide it; otherwise that device
makes a call without the keys before its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.core.context.cost import TILE
from attn_dispatch.core.context.device_call import (
    KEYS,
    Arrays,
    DeviceCall,
    added,
    alike,
)

_IDS = "key_value_segment_ids"


def compute(device: DeviceCall) -> Arrays:
    """The device's results."""
    own, links = device.only(KEYS), _links(device)
    last = {x: _cut(y, KEYS[x], -width(device), None) for x, y in own.items()}
    before = device.send_together(last, links)
    if _IDS in own:
        found, gradients = _behind(device, before)
    else:
        branches = (alike(lambda x: _first(device, x)), alike(lambda x: _behind(device, x)))
        found, gradients = cast(
            "tuple[Arrays, Arrays]", lax.cond(device.number == 0, *branches, before)
        )
    back = device.send_together(gradients, [(b, a) for a, b in links])
    for name, x in back.items():
        axis, rest = KEYS[name], found[name].shape[KEYS[name]] - width(device)
        padded = jnp.concatenate([jnp.zeros_like(_cut(found[name], axis, 0, rest)), x], axis)
        found |= added({name: found[name]}, {name: padded})
    return found


def width(device: DeviceCall) -> int:
    """The number of keys that a device receives: whole tiles of kernels, if there are so many."""
    left, _ = device.meaning.window
    assert left is not None
    return min(-(-left // TILE) * TILE, device.operands["key"].shape[-3])


def _links(device: DeviceCall) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(device.context.devices - 1)]


def _behind(device: DeviceCall, before: Mapping[str, jax.Array]) -> tuple[Arrays, Arrays]:
    """The results with the keys before the device's own, and the gradients of those keys."""
    meaning = replace(device.meaning, causal_alignment="bottom_right", same_lengths=False)
    own = device.only(KEYS)
    keys = {x: jnp.concatenate([before[x], y], KEYS[x]) for x, y in own.items()}
    found = device.piece(keys, meaning=meaning, is_part=False)
    of_keys = {x: y for x, y in found.items() if x in KEYS}
    return (
        found | {x: _cut(y, KEYS[x], width(device), None) for x, y in of_keys.items()},
        {x: _cut(y, KEYS[x], 0, width(device)) for x, y in of_keys.items()},
    )


def _first(device: DeviceCall, before: Mapping[str, jax.Array]) -> tuple[Arrays, Arrays]:
    """The same of the first device, which receives nothing."""
    found = device.piece(is_part=False)
    return found, {x: jnp.zeros_like(before[x]) for x in found if x in KEYS}


def _cut(x: jax.Array, axis: int, start: int, stop: int | None) -> jax.Array:
    where = [slice(None)] * x.ndim
    where[axis] = slice(start, stop)
    return x[tuple(where)]
