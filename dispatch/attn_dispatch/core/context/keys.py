"""A cache spread along its keys: every device attends from all rows to its own keys.

The results are merged by two small sums over the devices instead of a gather of the keys. In the
backward pass each device has the gradients of its own keys, and queries' are summed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.context import Context
from attn_dispatch.core.context.device_call import Arrays, DeviceCall, wide
from attn_dispatch.semantics.sinks import sinks_grad, with_sinks


def compute(device: DeviceCall) -> Arrays:
    """The device's results: those of all rows, and the gradients of its own keys."""
    # A single query that is level with the last key sees all keys.
    meaning = replace(device.meaning, is_causal=False, same_lengths=False)
    found = device.piece(
        device.own_lengths("key_value_seq_lengths", device.operands["key"].shape[-3]),
        meaning=meaning,
        without=("sinks",),
    )
    if not device.is_backward:
        total = merged(device.context, found)
        return with_sinks(total, device.operands["sinks"]) if "sinks" in device.operands else total
    if "query" in found:
        (query,) = wide({"query": found["query"]}).values()
        found["query"] = cast("jax.Array", lax.psum(query, device.context.axes))
    if "sinks" in device.options.wanted.gradients:
        found["sinks"] = device.unfolded("sinks", sinks_grad)
    return found


def merged(context: Context, found: Arrays) -> Arrays:
    """out and lse over the keys of all devices, as in semantics/merge.py."""
    axes, lse = context.axes, found["lse"]
    top = cast("jax.Array", lax.pmax(lse, axes))
    top = jnp.where(top == -jnp.inf, 0, top)
    # A maximum over devices may drop NaN, and on a CPU some fusions then make exp(NaN) 0.
    weight = jnp.where(jnp.isnan(lse), lse, jnp.exp(lse - top))
    by_row = jnp.swapaxes(weight, -1, -2)[..., None]
    out = jnp.where(by_row == 0, 0, found["out"].astype(lse.dtype)) * by_row
    total, out = cast("tuple[jax.Array, jax.Array]", lax.psum((weight, out), axes))
    is_empty = total == 0
    share = jnp.where(is_empty, 1, total)
    results = {
        "out": out / jnp.swapaxes(share, -1, -2)[..., None],
        "lse": jnp.where(is_empty, -jnp.inf, top + jnp.log(share)),
    }
    if "row_max" in found:
        results["row_max"] = cast("jax.Array", lax.pmax(found["row_max"], axes))
    return results
