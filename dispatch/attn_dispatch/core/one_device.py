"""The part of an attention call that one device computes, from the types of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.context.cost import Cost
from attn_dispatch.core.context.in_shard_map import Exchange, whole_call
from attn_dispatch.core.context.strategies import Spread
from attn_dispatch.core.context.strategy_costs import modelled
from attn_dispatch.core.device_share import (
    DeviceShare,
    device_call,
    exchanged_bytes,
    traced_call,
)
from attn_dispatch.core.explicit_axes import explicit_shards
from attn_dispatch.core.mesh_axes import name_of
from attn_dispatch.core.partly_manual import other_axes
from attn_dispatch.core.sharding_warnings import SplitCall, why_keys_move
from attn_dispatch.core.shards import Shardings, Shards, entry
from attn_dispatch.core.sketch import Sketch


def of_one_device(
    types: Sequence[ShapedArray],
    options: AttentionOptions,
    find_sketch: Callable[[], Sketch | None],
) -> tuple[AttentionSpec, DeviceShare | None]:
    """The call of one device, and which part of the program's call that is.

    The share is None in a program for one device.

    Args:
      types: the types of the operands. In a shard_map they have the shapes on one device.
      options: the options of the call.
      find_sketch: returns how Auto axes split the calls of the program, if it is for several
        devices.
    """
    mesh = types[0].sharding.mesh
    if options.meaning.context is not None:
        return _in_shard_map(types, options, mesh)
    whole = LeadingCall.of(types, options)
    kinds = set(mesh.axis_types)
    # As in primitive.py, which lowers the call: types show how it is split, if no axis is Auto.
    if AxisType.Explicit in kinds and AxisType.Auto not in kinds:
        specs = {x: y.sharding.spec for x, y in zip(options.operands, types, strict=True)}
        outside = Shardings.like_operands(whole.spec, specs)
        return _partitioned(whole, explicit_shards(whole, types), outside)
    manual, others = _of_kind(mesh, AxisType.Manual), other_axes(mesh)
    part = f"one device's part, in a shard_map over {_named(manual)}" if manual else "all of it"
    if others is None and manual:
        return whole.spec, DeviceShare(part, manual).received(whole.spec, 0)
    sketch = find_sketch()
    if others is None and sketch is None:
        return whole.spec, None
    ways = {} if sketch is None else sketch.find(whole, others)
    if not ways:
        along = "" if others is None else f" along {_named(_whole(others.shape))}"
        return whole.spec, DeviceShare(f"{part}: how XLA splits it{along} is not known", manual)
    # The call may be split differently at several places: show where a device computes most.
    shards = min(ways, key=lambda x: x.ways(sum(x.leading, ()) + x.heads))
    spec, share = _partitioned(whole, shards, ways[shards], manual)
    if len(ways) > 1:
        share = replace(share, text=f"{share}; at other places it is split otherwise")
    return spec, share


def _in_shard_map(
    types: Sequence[ShapedArray], options: AttentionOptions, mesh: Mesh | AbstractMesh
) -> tuple[AttentionSpec, DeviceShare]:
    """The same of a call with `context_axis`; if no strategy can run it, the whole call."""
    manual, others = _of_kind(mesh, AxisType.Manual), other_axes(mesh)
    try:
        exchange = Exchange.of(options, types, mesh)
    except NotImplementedError as error:
        text = f"the whole call, in a shard_map over {_named(manual)}"
        return whole_call(options, types).spec, DeviceShare(text, manual, refusal=str(error))
    own = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
    spec, received = traced_call(exchange.results, exchange.shards, own)
    share = _share(exchange.call, exchange.shards, exchange.specs, manual).received(spec, received)
    if others is not None:
        along = _named(_whole(others.shape))
        share = replace(share, text=f"{share}; how XLA splits it along {along} is not known")
    return spec, share


def _partitioned(
    call: LeadingCall,
    shards: Shards,
    outside: Shardings,
    manual: tuple[tuple[str, int], ...] = (),
) -> tuple[AttentionSpec, DeviceShare]:
    """The same of a call whose arrays the partitioner exchanges before and after it."""
    spec, received = device_call(shards, call)
    received += exchanged_bytes(shards, call, outside)
    return spec, _share(call, shards, outside.operands, manual).received(spec, received)


def _share(
    call: LeadingCall,
    shards: Shards,
    specs: Mapping[str, P],
    manual: tuple[tuple[str, int], ...],
) -> DeviceShare:
    """Which part of the call one device computes."""
    sizes = dict(shards.sizes)
    axes = (*sum(shards.leading, ()), *shards.heads, *shards.rows, *shards.keys)
    split = _whole({axis: sizes[axis] for axis in axes})
    idle = _whole({axis: size for axis, size in sizes.items() if axis not in axes})
    where = [f"in a shard_map over {_named(manual)}"] if manual else []
    split = tuple(x for x in split if x not in manual)
    where += [f"split along {_named(split)}"] if split else []
    notes = [f"one device's part, {', '.join(where)}"] if where else []
    notes += [f"all devices along {_named(idle)} compute the same"] if idle else []
    if why := why_keys_move(SplitCall(call, shards, specs)):
        notes.append(f"keys are gathered{why}")
    notes += _exchanges(call, shards, specs["query"])
    strategies = _strategies(call, shards, specs["query"])
    return DeviceShare(
        "; ".join(notes), manual + split, strategy=shards.strategy, strategies=strategies
    )


def _exchanges(call: LeadingCall, shards: Shards, query: P) -> Iterator[str]:
    """What devices exchange, if query or keys are sharded along their length."""
    exchanged = [x for x in entry(query, len(call.dims)) if x in shards.heads]
    if exchanged:
        sizes = dict(shards.sizes)
        axes = _whole({axis: sizes[axis] for axis in exchanged})
        yield f"tokens are exchanged for heads along {_named(axes)}"
    if shards.strategy in ("keys", "pages"):
        yield f"{shards.strategy} stay where they are, and devices sum results"
    elif shards.strategy is not None:
        yield f"rows stay where they are, keys come by {shards.strategy}"


def _strategies(call: LeadingCall, shards: Shards, query: P) -> tuple[Cost, ...]:
    """What each strategy costs, if query is sharded along its length."""
    along = entry(query, len(call.dims))
    spread = Spread.of(call.spec, shards.ways(along), shards.order)
    if spread is None:
        return ()
    ways = (
        shards.ways(tuple(x for x in axes if x not in along))
        for axes in (sum(shards.leading, ()), shards.heads)
    )
    batch, heads = ways
    return tuple(modelled(call.spec, spread, batch_ways=batch, head_ways=heads))


def _whole(axes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The axes that have several devices; parts of an axis are counted as one."""
    sizes = dict[str, int]()
    for axis, size in axes.items():
        sizes[name_of(axis)] = sizes.get(name_of(axis), 1) * size
    return tuple((name, size) for name, size in sizes.items() if size > 1)


def _of_kind(mesh: Mesh | AbstractMesh, kind: AxisType) -> tuple[tuple[str, int], ...]:
    """The axes of one kind that have more than one device, each with its number of devices."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = (name for name, its in kinds if its == kind)
    return tuple((x, mesh.shape[x]) for x in axes if mesh.shape[x] > 1)


def _named(axes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{axis!r} ({size})" for axis, size in axes)
