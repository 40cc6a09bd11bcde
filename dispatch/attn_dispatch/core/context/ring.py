"""Ring attention: every device's keys visit all devices, which attend to them one after the other.

The method is that of Liu et al. 2023 (arXiv:2310.01889). Rows and keys of a causal call are in
zigzag order, which gives all devices the same work in every step (Llama 3, arXiv:2407.21783): with
keys of an earlier device, all rows attend to their first half; with keys of a later device, the
second half of the rows attends to all of them. If each document is in zigzag order (documents.py),
the same holds for the halves of each document.

A device sends keys on while it computes with them. In the backward pass the sums of the keys'
gradients follow one step behind, and reach the keys' own device after the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

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
from attn_dispatch.core.context.documents import Documents, sent
from attn_dispatch.semantics.merge import merged
from attn_dispatch.semantics.row_flags import cleared_by_xla
from attn_dispatch.semantics.sinks import sinks_grad, with_sinks

S = TypeVar("S")
Number = int | jax.Array
_Step = Callable[[Arrays, Number], Arrays]
"""The results with the keys of the device so many positions before this one, cyclically."""
_Sums = tuple[Arrays, Arrays]
"""The gradients of rows, and of keys that are elsewhere by now."""

_UNROLLED = 7
"""The most steps that are written out: those within a node. More are a loop, so that a program for
more devices is not longer."""
_ONCE = ("sinks",)
"""Operands that count once for a row, not in every step."""


def compute(device: DeviceCall) -> Arrays:
    """The device's results; in a causal call rows and keys, or documents, are in zigzag order."""
    device = _with_cleared_padding(_without_long_segments(device))
    others = partial(_others, device, Documents.of(device))
    return (_backward if device.is_backward else _forward)(device, others)


def _with_cleared_padding(device: DeviceCall) -> DeviceCall:
    """The call with 0 in padding rows. Otherwise kernels would clear them in every step, for which
    XLA would copy arrays."""
    if "query_segment_ids" not in device.operands or device.meaning.finite_padding:
        return device
    sides = {
        "query_segment_ids": ("query", "out_grad") if device.is_backward else (),
        "key_value_segment_ids": ("key", "value"),
    }
    cleared = {
        name: cleared_by_xla(device.operands[name], device.operands[ids] != 0)
        for ids, names in sides.items()
        for name in names
    }
    promises = replace(device.options.promises, cleared_padding=True)
    options = replace(device.options, promises=promises)
    return replace(device, options=options, operands=dict(device.operands) | cleared)


def _without_long_segments(device: DeviceCall) -> DeviceCall:
    """The backward call with gradients of 0 through rows that are NaN.

    A segment may exceed max_segment_len in the step of one device's keys and not in another step,
    which then does not know that the segment's rows are NaN.
    """
    is_checked = device.options.promises.is_checked
    if not device.is_backward or device.meaning.max_seq_lens is None or is_checked:
        return device
    given = dict(device.operands)
    is_nan = jnp.isnan(given["lse"]).all(-2)  # a NaN of the caller's may be in one head alone
    by_row = {x: y for x, y in given.items() if x in ("out", "out_grad")}
    given |= {x: jnp.where(is_nan[..., None, None], 0, y) for x, y in by_row.items()}
    by_head = {x: fill for x, fill in (("lse", jnp.inf), ("lse_grad", 0)) if x in given}
    given |= {x: jnp.where(is_nan[..., None, :], fill, given[x]) for x, fill in by_head.items()}
    return replace(device, operands=given)


def _forward(device: DeviceCall, others: _Step) -> Arrays:
    def step(total: Arrays, keys: Arrays, number: Number) -> Arrays:
        return _merged(total, others(keys, number))

    total = _visited(device, step, device.piece(without=_ONCE))
    if "sinks" not in device.operands:
        return total
    return with_sinks(wide(total), device.operands["sinks"])


def _backward(device: DeviceCall, others: _Step) -> Arrays:
    def step(sums: _Sums, keys: Arrays, number: Number) -> _Sums:
        rows, passed = sums
        passed = device.shift(passed)
        found = others(keys, number)
        of_keys = _of_keys(found)
        return added(rows, _of_rows(found)), added(passed, of_keys) if passed else of_keys

    own = device.piece(without=_ONCE)
    rows, passed = _visited(device, step, (_of_rows(own), Arrays()))
    total = rows | added(_of_keys(own), device.shift(passed))
    if "sinks" in device.options.wanted.gradients:
        total["sinks"] = device.unfolded("sinks", sinks_grad)
    return total


def _visited(device: DeviceCall, step: Callable[[S, Arrays, Number], S], state: S) -> S:
    """The state after the keys of all other devices have visited this one.

    Args:
      device: the device's call.
      step: returns the next state from the state, the keys that are here, and how many positions
        their own device is before this one.
      state: the first state; from the second step on, the arrays have the same types.
    """

    def visit(number: Number, visited: tuple[S, Arrays]) -> tuple[S, Arrays]:
        state, keys = visited
        sent_on = device.shift(keys)
        return step(state, keys, number), sent_on

    last = device.context.devices - 1
    visited = state, device.shift(_received_anew(device, sent(device)))
    written_out = range(1, last if last <= _UNROLLED else 3)
    for number in written_out:
        visited = visit(number, visited)
    if last > _UNROLLED:
        visited = cast("tuple[S, Arrays]", lax.fori_loop(3, last, visit, visited))
    state, keys = visited
    return step(state, keys, last)


def _received_anew(device: DeviceCall, keys: Arrays) -> Arrays:
    """The keys; a barrier keeps the compiler from reusing what the forward pass has received.

    Otherwise a program of both passes would keep the keys of all devices between them.
    """
    if not device.is_backward:
        return keys
    return lax.optimization_barrier((keys, device.operands["out_grad"]))[0]


def _others(device: DeviceCall, documents: Documents | None, keys: Arrays, step: Number) -> Arrays:
    """What a `_Step` returns; `documents` are given if each is in zigzag order."""
    meaning = replace(device.meaning, is_causal=False, same_lengths=False)

    def piece(operands: Arrays) -> Arrays:
        return device.piece(operands, meaning=meaning, without=_ONCE)

    def earlier(keys: Arrays) -> Arrays:
        return {
            x: from_half(y, KEYS[x], 0) if x in KEYS else y
            for x, y in piece(half(keys, KEYS, 0)).items()
        }

    def later(keys: Arrays) -> Arrays:
        results = piece(half(device.operands, device.rows, 1) | keys)
        fill = {"lse": -jnp.inf, "row_max": -jnp.inf}
        return {
            x: from_half(y, device.rows[x], 1, fill.get(x, 0)) if x in device.rows else y
            for x, y in results.items()
        }

    if not device.meaning.is_causal:
        return piece(keys)
    is_earlier = step <= device.number
    if documents is not None:
        return piece(keys | documents.ids_of_step(is_earlier=is_earlier))
    return cast("Arrays", lax.cond(is_earlier, alike(earlier), alike(later), keys))


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
