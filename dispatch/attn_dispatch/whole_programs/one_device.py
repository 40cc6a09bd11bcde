"""The part of a program's attention call that one device computes."""

from __future__ import annotations

from collections.abc import Sequence

from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.explicit_axes import explicit_shards
from attn_dispatch.core.shards import Shards, device_spec


def of_one_device(
    types: Sequence[ShapedArray], options: AttentionOptions
) -> tuple[AttentionSpec, str]:
    """The call of one device, and how it differs from the program's; "" if it is the same.

    Args:
      types: the types of the operands. In a shard_map they have the shapes on one device.
      options: the options of the call.
    """
    whole = LeadingCall.of(types, options)
    mesh = types[0].sharding.mesh
    kinds = set(mesh.axis_types)
    # As in primitive.py, which lowers the call: types say how it is split, if no axis is Auto.
    if AxisType.Explicit in kinds and AxisType.Auto not in kinds:
        shards = explicit_shards(whole, types)
        return device_spec(shards, whole), split_by(shards)
    manual = _named(mesh, AxisType.Manual)
    left = "" if AxisType.Auto not in kinds else _named(mesh, AxisType.Auto)
    notes = [f"one device's part, in a shard_map over {manual}"] if manual else []
    notes += [f"XLA may split it along {left}"] if left else []
    return whole.spec, "; ".join(notes)


def split_by(shards: Shards) -> str:
    """The mesh axes that split a call."""
    sizes = dict(shards.sizes)
    axes = {axis: sizes[axis] for axis in (*sum(shards.leading, ()), *shards.heads)}
    split = ", ".join(f"{axis!r} ({size})" for axis, size in axes.items() if size > 1)
    return f"one device's part, split along {split}" if split else ""


def _named(mesh: Mesh | AbstractMesh, kind: AxisType) -> str:
    """The axes of one kind that have more than one device."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return ", ".join(
        f"{x!r} ({mesh.shape[x]})" for x, is_of in kinds if is_of == kind and mesh.shape[x] > 1
    )
