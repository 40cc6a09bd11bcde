"""A cache spread over devices: every device attends from all rows to the keys that it holds.

They are a part of the keys, or some pages of a pool. The results are merged by two small sums over
the devices instead of a gather of the keys. In the backward pass each device has the gradients of
its own keys, and queries' are summed.

A device moves its own pages to the front of each row of the page table. They stay in their order,
so that only the last one may be partly filled, and a length says how many keys there are: an
ordinary paged call. Each causal query has a row of its own, because between the pages that a device
holds there is no diagonal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.context import Context
from attn_dispatch.call.operands import with_axis
from attn_dispatch.core.context.device_call import Arrays, DeviceCall, alike, wide
from attn_dispatch.semantics.sinks import sinks_grad, with_sinks

_POOLS = with_axis("p")


def of_keys(device: DeviceCall) -> Arrays:
    """The device's results: those of all rows, and the gradients of its own keys."""
    # A single query that is level with the last key sees all keys.
    meaning = replace(device.meaning, is_causal=False, same_lengths=False)
    results = device.piece(
        device.own_lengths("key_value_seq_lengths", device.operands["key"].shape[-3]),
        meaning=meaning,
        without=("sinks",),
    )
    if not device.is_backward:
        return _with_sinks(device, _merged(device.context, results))
    if "query" in results:
        (query,) = wide({"query": results["query"]}).values()
        results["query"] = cast("jax.Array", lax.psum(query, device.context.axes))
    if "sinks" in device.options.wanted.gradients:
        results["sinks"] = device.unfolded("sinks", sinks_grad)
    return results


def of_pages(device: DeviceCall) -> Arrays:
    """The results of all rows, on each device."""
    return _with_sinks(device, _in_call(device, _merged(device.context, _own_results(device))))


def _merged(context: Context, own: Arrays) -> Arrays:
    """out and lse over the keys of all devices, as in semantics/merge.py."""
    axes, lse = context.axes, own["lse"]
    top = cast("jax.Array", lax.pmax(lse, axes))
    top = jnp.where(top == -jnp.inf, 0, top)
    # A maximum over devices may drop NaN, and on a CPU some fusions then make exp(NaN) 0.
    weight = jnp.where(jnp.isnan(lse), lse, jnp.exp(lse - top))
    by_row = jnp.swapaxes(weight, -1, -2)[..., None]
    out = jnp.where(by_row == 0, 0, own["out"].astype(lse.dtype)) * by_row
    total, out = cast("tuple[jax.Array, jax.Array]", lax.psum((weight, out), axes))
    is_empty = total == 0
    share = jnp.where(is_empty, 1, total)
    results = {
        "out": out / jnp.swapaxes(share, -1, -2)[..., None],
        "lse": jnp.where(is_empty, -jnp.inf, top + jnp.log(share)),
    }
    if "row_max" in own:
        results["row_max"] = cast("jax.Array", lax.pmax(own["row_max"], axes))
    return results


def _with_sinks(device: DeviceCall, merged: Arrays) -> Arrays:
    return with_sinks(merged, device.operands["sinks"]) if "sinks" in device.operands else merged


def _own_results(device: DeviceCall) -> Arrays:
    """out and lse over the pages that the device holds, with rows as of `_visible`.

    A device may hold fewer pages than the table has columns. Then the table is cut, unless a row
    names pages repeatedly.
    """
    table, lengths, most = _own_pages(device)
    query, pools = device.operands["query"], device.only(_POOLS)
    rows, columns, own = lengths.shape[-1], table.shape[-1], pools["key_pages"].shape[-4]
    given = {x: jnp.expand_dims(y, -5) for x, y in pools.items()} | {
        "query": query.reshape(*query.shape[:-3], rows, -1, *query.shape[-2:]),
        "page_table": jnp.broadcast_to(table[..., None, :], (*lengths.shape, columns)),
        "key_value_seq_lengths": lengths,
    }
    is_causal = device.meaning.is_causal
    without = ("sinks", "query_seq_lengths") if is_causal else ("sinks",)
    if "query_seq_lengths" in device.operands and not is_causal:
        given["query_seq_lengths"] = device.operands["query_seq_lengths"][..., None]
    meaning = replace(device.meaning, is_causal=False, same_lengths=False)

    def attend(given: Arrays) -> Arrays:
        return device.piece(given, meaning=meaning, without=without)

    def attend_to_few(given: Arrays) -> Arrays:
        return attend(given | {"page_table": given["page_table"][..., :own]})

    if columns <= own:
        return attend(given)
    return cast("Arrays", lax.cond(most <= own, alike(attend_to_few), alike(attend), given))


def _own_pages(device: DeviceCall) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The device's pages of each row.

    Returns:
      [..., M]: their numbers in the device's part of the pool, in the order of their keys, and then
      unspecified numbers; [..., R]: the keys in them that each row of `_visible` sees, or -1; and
      the largest number of pages of a row.
    """
    table, lengths = (device.operands[x] for x in ("page_table", "key_value_seq_lengths"))
    own, size = device.operands["key_pages"].shape[-4:-2]
    visible, is_invalid = _visible(device)
    columns = jnp.arange(table.shape[-1], dtype=jnp.int32)
    begins = size * columns
    is_reached = begins < lengths[..., None]
    is_missing = is_reached & ((table < 0) | (table >= own * device.context.devices))
    is_invalid |= is_missing.any(-1) | (lengths < 0) | (lengths > size * table.shape[-1])
    here = table - device.number * own
    is_own = is_reached & (here >= 0) & (here < own)
    in_page = jnp.clip(visible[..., None] - begins, 0, size)
    count = jnp.where(is_own[..., None, :], in_page, 0).sum(-1, dtype=jnp.int32)
    _, ordered = lax.sort((jnp.where(is_own, columns, columns.size), here), num_keys=1)
    return ordered, jnp.where(is_invalid[..., None], -1, count), is_own.sum(-1).max()


def _visible(device: DeviceCall) -> tuple[jax.Array, jax.Array]:
    """The number of keys [..., R] that each row sees, and whether numbers of queries are invalid.

    A row is one query of a causal call, and otherwise all queries.
    """
    lengths, queries = device.operands["key_value_seq_lengths"], device.operands["query"].shape[-3]
    if not device.meaning.is_causal:
        return lengths[..., None], jnp.zeros_like(lengths, bool)
    number = device.operands.get("query_seq_lengths", jnp.full_like(lengths, queries))
    t = jnp.arange(queries, dtype=jnp.int32)
    seen = jnp.where(t < number[..., None], (lengths - number)[..., None] + t + 1, 0)
    return jnp.maximum(seen, 0), (number < 0) | (number > queries)


def _in_call(device: DeviceCall, results: Arrays) -> Arrays:
    """The results with all queries along one axis: out [..., T, N, V], lse [..., N, T]."""
    spec = device.call.spec

    def by_head(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, -3, -2)  # [..., N, R, T / R]
        return x.reshape(*x.shape[:-2], spec.seq_len_q)

    out = results["out"]
    by_name = {x: by_head(y) for x, y in results.items() if x != "out"}
    return {"out": out.reshape(*out.shape[:-4], spec.seq_len_q, *out.shape[-2:])} | by_name
