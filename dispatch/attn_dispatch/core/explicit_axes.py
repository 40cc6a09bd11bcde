"""Attention under Explicit mesh axes, where the types of arrays contain their sharding.

Such a call is lowered to a `shard_map` in which each device computes its shard. JAX treats that as
any other program: it can export it, and find it in the compilation cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import jax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.core import jax_compat
from attn_dispatch.core.jax_compat import Context, MlirValues
from attn_dispatch.core.sharding_warnings import SplitCall, warn_of_costs
from attn_dispatch.core.shards import WITH_ROWS, Shards, key_operand, layouts, shard_call
from attn_dispatch.core.splitting import split

P = ParamSpec("P")
R = TypeVar("R")


def explicit_lowering(
    bind: Bind, ctx: Context, operands: MlirValues, options: AttentionOptions
) -> MlirValues:
    """Lower a call that is split as the types of its operands say; results as their types say.

    The call may stand in a shard_map over other axes of the mesh.
    """
    types = jax_compat.types_of(ctx)
    mesh = types[0].sharding.mesh
    whole = LeadingCall.of(types, options)
    shards = explicit_shards(whole, types)
    by_name = zip(options.operands, types, strict=True)
    specs = {name: x.sharding.spec for name, x in by_name if name in WITH_ROWS}
    warn_of_costs(SplitCall(whole, shards, specs))
    inputs, outputs = (tuple(map(shards.spec_of, side)) for side in layouts(whole))

    def call(*operands: jax.Array) -> list[jax.Array]:
        def shard(*own: jax.Array) -> tuple[jax.Array, ...]:
            return shard_call(bind, whole, shards, own)

        results = jax.shard_map(
            shard, mesh=mesh, axis_names=set(dict(shards.sizes)), in_specs=inputs,
            out_specs=outputs, check_vma=False,
        )(*(_resharded(x, mesh, to) for x, to in zip(operands, inputs, strict=True)))  # fmt: skip
        to = [aval.sharding.spec for aval in ctx.avals_out]
        return [_resharded(x, mesh, spec) for x, spec in zip(results, to, strict=True)]

    return jax_compat.lower_typed_as(call, ctx, operands)


def explicit_shards(call: LeadingCall, types: Sequence[ShapedArray]) -> Shards:
    """How the Explicit axes of a mesh split a call, as the types of its operands say."""
    mesh = types[0].sharding.mesh
    sizes = {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    by_name = dict(zip(call.options.operands, types, strict=True))
    query, key = (by_name[name].sharding.spec for name in ("query", key_operand(call)))
    return split(call, sizes, query, key)


def with_auto_axes(
    function: Callable[P, R],
    like: Sequence[jax.Array],
    mapped: Sequence[int | None] | None = None,
) -> Callable[P, R]:
    """The function with Explicit axes made Auto inside it, and its results sharded like `like`.

    So the partitioner, not the types, shards the operations of a formula.

    Args:
      function: a function of arrays only; it must not close over any.
      like: one array for each result, whose sharding the result gets.
      mapped: the dim of each of these that `vmap` maps, None for an array that is not mapped. In
        the results the mapped dim is first, and not sharded.
    """
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in like))
    mesh = next((x for x in meshes if not x.empty), meshes[0])
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not axes:
        return function
    specs = [jax.typeof(x).sharding.spec for x in like]
    if mapped is not None:
        dims = zip(specs, mapped, strict=True)
        specs = [
            PartitionSpec(None, *(axis for i, axis in enumerate(spec) if i != dim))
            for spec, dim in dims
        ]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    inner = cast(
        "Callable[P, R]", jax.sharding.auto_axes(function, axes=axes, out_sharding=shardings)
    )

    def call(*arrays: P.args, **others: P.kwargs) -> R:
        # auto_axes needs a mesh in its context, which types alone do not set.
        with jax.sharding.use_abstract_mesh(mesh):
            return inner(*arrays, **others)

    return call


def _resharded(x: jax.Array, mesh: Mesh | AbstractMesh, to: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*to, *(None for _ in range(x.ndim - len(to)))))
    return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)
