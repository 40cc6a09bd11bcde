"""Ring attention: every device's keys visit all devices, which attend to them one after the other.

Liu et al. 2023 (arXiv:2310.01889). In a causal call rows and keys are in zigzag order, so that all
devices have equally much to do in every step (Llama 3, arXiv:2407.21783). A device that receives
the keys of an earlier one attends to the first half of these alone; to those of a later one, only
its own second half of rows does.

Keys are sent on while a device computes with them. In the backward pass the sums of their gradients
follow them, one step behind, and are home after the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.core.context.device_call import (
    KEYS,
    Arrays,
    DeviceCall,
    added,
    alike,
    from_half,
    half,
    wide,
)
from attn_dispatch.semantics.merge import merged
from attn_dispatch.semantics.sinks_afterwards import with_sinks
from attn_dispatch.semantics.sinks_grad import sinks_grad

_ONCE = ("sinks",)
"""Operands that count once for a row, not in every step."""


def compute(device: DeviceCall) -> Arrays:
    """The device's results; in a causal call rows and keys are in zigzag order."""
    return _backward(device) if device.is_backward else _forward(device)


def _forward(device: DeviceCall) -> Arrays:
    keys, total = device.only(KEYS), device.piece(without=_ONCE)
    for step in range(1, device.context.devices):
        keys = device.shift(keys)
        total = _merged(total, _others(device, keys, step))
    if "sinks" not in device.operands:
        return total
    return with_sinks(wide(total), device.operands["sinks"])


def _backward(device: DeviceCall) -> Arrays:
    keys, own = device.only(KEYS), device.piece(without=_ONCE)
    rows, passed = _of_rows(own), Arrays()
    for step in range(1, device.context.devices):
        keys, passed = device.shift(keys), device.shift(passed)
        found = _others(device, keys, step)
        rows = added(rows, _of_rows(found))
        passed = added(passed, _of_keys(found)) if passed else _of_keys(found)
    total = rows | added(_of_keys(own), device.shift(passed))
    if "sinks" in device.options.wanted.gradients:
        total["sinks"] = device.unfolded("sinks", sinks_grad)
    return total


def _others(device: DeviceCall, keys: Mapping[str, jax.Array], step: int) -> Arrays:
    """The results with the keys of the device `step` positions before this one, cyclically."""
    meaning = replace(device.meaning, is_causal=False, same_lengths=False)

    def piece(operands: Arrays) -> Arrays:
        return device.piece(operands, meaning=meaning, without=_ONCE)

    def earlier(keys: Arrays) -> Arrays:
        return {
            x: from_half(y, KEYS[x], 0) if x in KEYS else y
            for x, y in piece(half(keys, KEYS, 0)).items()
        }

    def later(keys: Arrays) -> Arrays:
        found = piece(half(device.operands, device.rows, 1) | keys)
        fill = {"lse": -jnp.inf, "row_max": -jnp.inf}
        return {
            x: from_half(y, device.rows[x], 1, fill.get(x, 0)) if x in device.rows else y
            for x, y in found.items()
        }

    if not device.meaning.is_causal:
        return piece(dict(keys))
    is_earlier = step <= device.number
    return cast("Arrays", lax.cond(is_earlier, alike(earlier), alike(later), dict(keys)))


def _merged(a: Arrays, b: Arrays) -> Arrays:
    """The results of both sets of keys; out in float32 at least."""
    lse_a, lse_b = (jnp.swapaxes(x["lse"], -1, -2) for x in (a, b))
    out, lse = merged(wide(a)["out"], lse_a, b["out"], lse_b)
    largest = {"row_max": jnp.maximum(a["row_max"], b["row_max"])} if "row_max" in a else {}
    return {"out": out, "lse": jnp.swapaxes(lse, -1, -2)} | largest


def _of_rows(gradients: Arrays) -> Arrays:
    return {x: y for x, y in gradients.items() if x not in KEYS}


def _of_keys(gradients: Arrays) -> Arrays:
    return {x: y for x, y in gradients.items() if x in KEYS}
