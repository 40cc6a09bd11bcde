"""The results of one device's part of a call whose sequence is spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax

from attn_dispatch.call.context import Context, Strategy
from attn_dispatch.call.leading import Bind
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.core.context import gather, halo, own_keys, ring
from attn_dispatch.core.context.device_call import KEYS, Arrays, DeviceCall
from attn_dispatch.core.context.zigzag import to_contiguous, to_zigzag


def results(
    bind: Bind, options: AttentionOptions, operands: Sequence[jax.Array], context: Context
) -> tuple[jax.Array, ...]:
    """The results of the call, in the order of `AttentionSpec.result_names`.

    Args:
      bind: returns, for options, the function that computes a call on one device.
      options: those of the call.
      operands: the device's rows and keys, and its parts of the other operands.
      context: how rows and keys are spread, and a strategy that can run the call.
    """
    assert context.strategy is not None
    device = DeviceCall.of(bind, options, operands, context)
    return device.rounded(_STRATEGIES[context.strategy](device))


def _ring(device: DeviceCall) -> Arrays:
    if device.context.order == "contiguous" and device.meaning.is_causal:
        return _in_zigzag(device, device.rows | KEYS, ring.compute)
    return ring.compute(device)


def _gather(device: DeviceCall) -> Arrays:
    # Under a window all rows see about as many keys. Under causality alone, late rows see more.
    is_uneven = device.meaning.is_causal and device.meaning.window == (None, None)
    is_even_length = device.operands["query"].shape[-3] % 2 == 0
    if device.context.order == "zigzag" or not (is_uneven and is_even_length):
        return gather.compute(device, device.context.order)
    return _in_zigzag(device, device.rows, lambda x: gather.compute(x, "zigzag"))


def _in_zigzag(
    device: DeviceCall, axes: Mapping[str, int], compute: Callable[[DeviceCall], Arrays]
) -> Arrays:
    """The results of a device's contiguous rows, computed in zigzag order.

    Args:
      device: the device's call.
      axes: the operands and results that are sent to be in that order, with the axis of their rows
        or keys.
      compute: returns the results from a call in zigzag order.
    """
    here = {x: y for x, y in device.operands.items() if x in axes}
    there = replace(device, operands=dict(device.operands) | to_zigzag(device, here, axes))
    names = device.call.spec.result_names
    results = dict(zip(names, there.rounded(compute(there)), strict=True))
    back = {x: y for x, y in results.items() if x in axes}
    return results | to_contiguous(device, back, axes)


_STRATEGIES: dict[Strategy, Callable[[DeviceCall], Arrays]] = {
    "ring": _ring, "gather": _gather, "halo": halo.compute, "keys": own_keys.of_keys,
    "pages": own_keys.of_pages,
}  # fmt: skip
