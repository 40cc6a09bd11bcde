"""The part of a program's attention call that one device computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.device_share import device_spec, received_bytes
from attn_dispatch.core.explicit_axes import explicit_shards
from attn_dispatch.core.shards import Shards
from attn_dispatch.core.sketch import Sketch
from attn_dispatch.text import in_units


def of_one_device(
    types: Sequence[ShapedArray], options: AttentionOptions, sketch: Sketch | None
) -> tuple[AttentionSpec, str]:
    """The call of one device, and which part of the program's call that is; "" if it is all of it.

    Args:
      types: the types of the operands. In a shard_map they have the shapes on one device.
      options: the options of the call.
      sketch: how Auto axes split the calls of a program for several devices; None for one.
    """
    whole = LeadingCall.of(types, options)
    mesh = types[0].sharding.mesh
    kinds = set(mesh.axis_types)
    # As in primitive.py, which lowers the call: types show how it is split, if no axis is Auto.
    if AxisType.Explicit in kinds and AxisType.Auto not in kinds:
        specs = {x: y.sharding.spec for x, y in zip(options.operands, types, strict=True)}
        return _part(whole, explicit_shards(whole, types), specs)
    manual, auto = (_named(mesh, kind) for kind in (AxisType.Manual, AxisType.Auto))
    if manual:
        part = f"one device's part, in a shard_map over {manual}"
        return whole.spec, part + (f"; all devices along {auto} compute it" if auto else "")
    if sketch is None:
        return whole.spec, ""
    ways = sketch.find(whole)
    if not ways:
        return whole.spec, "all of it: how XLA splits it is not known"
    # The call may be split differently at several places: show where a device computes most.
    shards = min(ways, key=lambda x: x.ways(sum(x.leading, ()) + x.heads))
    spec, part = _part(whole, shards, ways[shards])
    return spec, part + ("; at other places it is split otherwise" if len(ways) > 1 else "")


def _part(call: LeadingCall, shards: Shards, specs: Mapping[str, P]) -> tuple[AttentionSpec, str]:
    sizes = dict(shards.sizes)
    axes = [x for x in (*sum(shards.leading, ()), *shards.heads) if sizes[x] > 1]
    split = ", ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)
    idle = ", ".join(
        f"{axis!r} ({size})" for axis, size in sizes.items() if size > 1 and axis not in axes
    )
    notes = [f"one device's part, split along {split}"] if split else []
    notes += [f"all devices along {idle} compute the same"] if idle else []
    if received := received_bytes(shards, call, specs):
        notes.append(f"receives {in_units(received)} of its operands from other devices")
    return device_spec(shards, call), "; ".join(notes)


def _named(mesh: Mesh | AbstractMesh, kind: AxisType) -> str:
    """The axes of one kind that have more than one device."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return ", ".join(
        f"{x!r} ({mesh.shape[x]})" for x, is_of in kinds if is_of == kind and mesh.shape[x] > 1
    )
