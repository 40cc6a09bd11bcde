"""Calls inside a shard_map over some mesh axes, whose other axes are left to the partitioner.

Along the other axes the partitioner asks how to split a call as it does under `jit`
(partitioning.py), but shows one group of devices as if it were all of them: which of the axes
splits an array is not known. So a device learns where its part begins from parts of arrays of
numbers, which are operands, and nothing can be summed over devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.core.mesh_axes import parts_of
from attn_dispatch.core.shards import Begin, Shardings, Shards, entry, key_operand, numbered_axes
from attn_dispatch.core.splitting import split


def other_axes(mesh: Mesh | AbstractMesh) -> AbstractMesh | None:
    """The axes that are not manual inside a shard_map.

    None outside of a shard_map, or if no other axis has several devices.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    sizes = {x: mesh.shape[x] for x, kind in kinds.items() if kind != AxisType.Manual}
    if len(sizes) == len(kinds) or math.prod(sizes.values()) == 1:
        return None
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def group_of(mesh: Mesh) -> Mesh:
    """The mesh of a group of devices. It has one axis: which axis splits an array is not known."""
    return Mesh(mesh.devices.reshape(-1), (" or ".join(mesh.axis_names),))


def group_shards(
    others: AbstractMesh, call: LeadingCall, outside: Shardings
) -> tuple[Shards, Shardings]:
    """How a call is split along the other axes, and its shardings, both with parts of the axes."""
    parts = parts_of(others.shape)
    sizes = {part: size for of_axis in parts.values() for part, size in of_axis.items()}

    def in_parts(x: P) -> P:
        dims = (entry(x, i) for i in range(len(x)))
        return P(*(tuple(part for axis in dim for part in parts[axis]) for dim in dims))

    specs = {name: in_parts(x) for name, x in outside.operands.items()}
    shards = split(call, sizes, specs["query"], specs[key_operand(call)], wanted="heads")
    results = tuple(None if x is None else in_parts(x) for x in outside.results)
    return without_sums(shards, call)[0], Shardings(specs, results)


def numbers(call: LeadingCall) -> list[jax.Array]:
    """Arrays that count along the axes of `numbered_axes`: operands of a call in a group."""
    return [jnp.arange(size, dtype=jnp.int32) for size in numbered_axes(call).values()]


def begin_in(call: LeadingCall, parts: Sequence[jax.Array]) -> Begin:
    """Where this device's part of a call begins, from its parts of `numbers`."""
    first = {x: part[0] for x, part in zip(numbered_axes(call), parts, strict=True)}
    return first.__getitem__


def without_sums(shards: Shards, call: LeadingCall) -> tuple[Shards, tuple[str, ...]]:
    """The split with every gradient on one device, and the axes that then split nothing.

    An axis along which devices share a gradient splits the kv heads or a batch dim instead, if it
    divides these and no gradient is shared there.
    """
    shared = _shared(shards, call)
    parts, left_out = _without(shards, shared), list[str]()
    for axis in shared:
        better = (x for x in _with(parts, axis, call) if not _shared(x, call))
        found = next(better, None)
        if found is None:
            left_out.append(axis)
        else:
            parts = found
    return parts, tuple(left_out)


def _shared(shards: Shards, call: LeadingCall) -> tuple[str, ...]:
    """The axes along which devices share a gradient.

    With dropout all possible gradients count, in both directions: a kernel draws the same mask in
    both only if they are split alike.
    """
    options = call.options
    gradients = options.wanted.gradients
    if options.meaning.dropout_rate:
        gradients = options.differentiable
    return tuple(dict.fromkeys(x for name in gradients for x in shards.summed(call, name)))


def _without(shards: Shards, axes: Sequence[str]) -> Shards:
    def kept(given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(x for x in given if x not in axes)

    return replace(
        shards,
        leading=tuple(map(kept, shards.leading)),
        kv_heads=kept(shards.kv_heads),
        groups=kept(shards.groups),
    )


def _with(shards: Shards, axis: str, call: LeadingCall) -> Iterator[Shards]:
    """The split with one more axis, in each dim that it divides."""
    heads = (*shards.kv_heads, axis)
    if not shards.groups and call.spec.num_kv_heads % shards.ways(heads) == 0:
        yield replace(shards, kv_heads=heads)
    for i, size in enumerate(call.dims):
        own = (*shards.leading[i], axis)
        if size % shards.ways(own) == 0:
            yield replace(shards, leading=(*shards.leading[:i], own, *shards.leading[i + 1 :]))
