"""Gathered keys: every device receives all keys, and attends to them from its own rows.

A causal call, or one with a window, is computed for each chunk of rows that is in one piece of the
sequence. Keys past the end of the chunk are cut off by lengths or segment ids, so that its last row
lines up with the last key: kernels skip what is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.core.context.device_call import (
    KEYS,
    Arrays,
    DeviceCall,
    added,
    half,
    wide,
)
from attn_dispatch.core.context.strategies import has_diagonal
from attn_dispatch.core.context.zigzag import in_sequence, in_zigzag


@dataclass(frozen=True)
class _Chunk:
    """Rows that are in one piece of the sequence."""

    rows: Arrays
    first: jax.Array
    """The position of the first row in the sequence."""

    @property
    def end(self) -> jax.Array:
        return self.first + self.rows["query"].shape[-3]


def compute(device: DeviceCall, rows: SequenceOrder) -> Arrays:
    """The device's results.

    Args:
      device: the device's call; its context has the order of keys.
      rows: the order of rows.
    """
    keys = _gathered(device)
    if not has_diagonal(device.meaning, device.operands):
        meaning = replace(device.meaning, same_lengths=False)
        own = keys | device.own_lengths("query_seq_lengths", device.operands["query"].shape[-3])
        chunks = [device.piece(own, meaning=meaning, is_part=False)]
    else:
        chunks = [_of_chunk(device, keys, chunk) for chunk in _chunks(device, rows)]
    found = {
        x: jnp.concatenate([results[x] for results in chunks], device.rows[x])
        for x in chunks[0]
        if x in device.rows
    }
    sums = [{x: y for x, y in results.items() if x not in device.rows} for results in chunks]
    total = sums[0]
    for more in sums[1:]:
        total = added(total, more)
    return found | {x: _at_home(device, x, y) if x in KEYS else y for x, y in total.items()}


def _chunks(device: DeviceCall, order: SequenceOrder) -> Iterator[_Chunk]:
    context, number = device.context, device.number
    rows = device.only(device.rows)
    length = rows["query"].shape[-3]
    if order == "contiguous":
        yield _Chunk(rows, number * length)
        return
    for which, chunk in enumerate((number, 2 * context.devices - 1 - number)):
        yield _Chunk(half(rows, device.rows, which), chunk * (length // 2))


def _of_chunk(device: DeviceCall, keys: Arrays, chunk: _Chunk) -> Arrays:
    """The results of the rows of a chunk with the keys up to its end."""
    meaning = replace(device.meaning, causal_alignment="bottom_right", same_lengths=False)
    rows, keys = dict(chunk.rows), dict(keys)
    ids = "key_value_segment_ids"
    if ids in keys:
        is_cut = jnp.arange(keys[ids].shape[-1]) >= chunk.end
        keys[ids] = jnp.where(is_cut, 0, keys[ids])
    else:
        leading = rows["query"].shape[:-3]
        keys["key_value_seq_lengths"] = jnp.full(leading, chunk.end, jnp.int32)
    return device.piece(rows | keys, meaning=meaning, is_part=False)


def _gathered(device: DeviceCall) -> Arrays:
    """The keys of all devices, in the order of the sequence."""
    context = device.context

    def gathered(x: jax.Array, axis: int) -> jax.Array:
        axis += x.ndim
        whole = cast("jax.Array", lax.all_gather(x, context.axes, axis=axis, tiled=True))
        return in_sequence(whole, axis, context.devices) if context.order == "zigzag" else whole

    return {x: gathered(y, KEYS[x]) for x, y in device.only(KEYS).items()}


def _at_home(device: DeviceCall, name: str, gradient: jax.Array) -> jax.Array:
    """This device's keys of a gradient for all keys, summed over the devices in float32."""
    context, axis = device.context, KEYS[name] + gradient.ndim
    x = wide({name: gradient})[name]
    if context.order == "zigzag":
        x = in_zigzag(x, axis, context.devices)
    return cast("jax.Array", lax.psum_scatter(x, context.axes, scatter_dimension=axis, tiled=True))
