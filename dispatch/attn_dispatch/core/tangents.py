"""What attn_jvp is lowered to: a kernel where an implementation has one, or else formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from attn_dispatch.call.options import FORWARD_MODE, AttentionOptions
from attn_dispatch.core import jax_compat, select
from attn_dispatch.core.formulas import (
    FOR_PLATFORMS,
    OVER_DEVICES,
    call_of_tangents,
    spec_of_tangents,
    tangents_of_results,
)
from attn_dispatch.core.jax_compat import Context
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import ComputesTangents
from attn_dispatch.devices.target import default_device, device_for, targets_to_check
from attn_dispatch.typed_jax import array_type


def derivative_on(mesh: Mesh | AbstractMesh, devices: int = 1) -> str:
    """What attn_jvp computes where its operands have a mesh: XLA splits formulas, but no kernel.

    Args:
      mesh: the mesh of the operands' types.
      devices: how many the program is for, as far as that is known.
    """
    if set(mesh.axis_types) == {AxisType.Manual}:  # inside a shard_map over all axes
        return FORWARD_MODE
    return FORWARD_MODE if max(mesh.size, devices) <= 1 else OVER_DEVICES


def may_run_on_kernel(
    arrays: Sequence[jax.Array],
    dims: Sequence[int | None],
    options: AttentionOptions,
    wanted: tuple[str, ...],
) -> bool:
    """Whether a kernel of the default device runs mapped tangents as those of one call.

    Formulas compute what no tangent moves once for all mapped calls. A kernel computes it for each,
    and is faster even so.

    Args:
      arrays: the operands, and what follows them.
      dims: the mapped axis of each.
      options: the call's options.
      wanted: the operands that have tangents.
    """
    types = [array_type(x) for x in arrays[: len(options.operands)]]
    if any(derivative_on(x.sharding.mesh) != FORWARD_MODE for x in types):
        return False
    shapes = [
        [size for axis, size in enumerate(x.shape) if axis != dim]
        for x, dim in zip(types, dims, strict=False)
    ]
    parts = [jax.ShapeDtypeStruct(x, y.dtype) for x, y in zip(shapes, types, strict=True)]
    asked, device = spec_of_tangents(parts, options, wanted), default_device()
    return not asked.is_empty and select.has_kernel(asked, device)


def function_to_lower(
    ctx: Context, options: AttentionOptions, wanted: tuple[str, ...]
) -> Callable[..., list[jax.Array]]:
    """The function of attn_jvp's operands that it is lowered to."""
    platforms, types = jax_compat.platforms_of(ctx), jax_compat.types_of(ctx)
    derivative = FOR_PLATFORMS
    if len(platforms) == 1:
        mesh = cast("AbstractMesh", types[0].sharding.mesh)
        derivative = derivative_on(mesh, jax_compat.number_of_devices(ctx))
    asked = spec_of_tangents(types[: len(options.operands)], options, wanted, derivative)
    device = device_for(platforms[0])
    if derivative != FORWARD_MODE or asked.is_empty or not select.has_kernel(asked, device):
        # Formulas ask for the call themselves, and warn.
        return partial(tangents_of_results, options=options, wanted=wanted, derivative=derivative)
    for target in targets_to_check(platforms[0]):
        select.choose(asked, target)
    return partial(_by_kernel, options=options, wanted=wanted, device=device)


def _by_kernel(
    *arrays: jax.Array, options: AttentionOptions, wanted: tuple[str, ...], device: Device
) -> list[jax.Array]:
    """The tangents of out and lse, by the chosen implementation."""
    count = len(options.operands)
    operands, moved = arrays[:count], arrays[-len(wanted) :]
    call = call_of_tangents(operands, options, wanted)
    by_name = call.fold(dict(zip(options.operands, operands, strict=True)))
    by_name |= {"out": call.fold_shared(arrays[count]), "lse": call.fold_shared(arrays[count + 1])}
    asked = spec_of_tangents(operands, options, wanted)
    implementation = cast("object", select.choose(asked, device).implementation)
    assert isinstance(implementation, ComputesTangents)
    tangents = call.fold(dict(zip(wanted, moved, strict=True)))
    results = call.unfold(implementation.tangents(asked, device, by_name, tangents))
    # As in primitive.py: XLA would run a kernel twice in a scan that stores its results.
    return list(jax.lax.optimization_barrier(tuple(results)))
