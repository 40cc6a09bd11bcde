"""The JAX primitives attn_fwd and attn_bwd, and the differentiable call made of them.

A primitive takes the operands as arrays and one static parameter, the options. Whatever JAX does
to the call (vmap, sharding, export), its lowering sees the arrays that are really there, makes the
spec of them, and asks `select` who computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import select
from attn_dispatch.batching import fold_batch
from attn_dispatch.partitioning import can_partition, partitioned
from attn_dispatch.spec import (
    DIFFERENTIABLE,
    AttentionOptions,
    AttentionSpec,
    backward_options,
)
from attn_dispatch.target import device_for


def attention(options: AttentionOptions, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """(out,) or, if options.needs_lse, (out, lse), differentiable; see spec.py for shapes."""
    # jax.custom_vjp forgets the type of what it wraps.
    return cast("tuple[jax.Array, ...]", _attention(options, _vary_alike(operands)))


def _vary_alike(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Under shard_map, what is the same on all devices is made to vary like the rest.

    The transpose of that is a sum over the devices: what the gradient of a shared operand is.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).mat.varying for x in operands))
    missing = [tuple(sorted(axes - jax.typeof(x).mat.varying)) for x in operands]
    return tuple(
        jax.lax.pcast(x, over, to="varying") if over else x
        for x, over in zip(operands, missing, strict=True)
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: AttentionOptions, operands: tuple[jax.Array, ...]):
    return tuple(attn_fwd_p.bind(*operands, options=options))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Which operands' gradients are asked for, as a residual without arrays."""

    names: tuple[str, ...]


def _attention_fwd(options, operands):
    arrays = tuple(operand.value for operand in operands)
    wanted = tuple(
        name
        for name, operand in zip(options.operands, operands, strict=True)
        if operand.perturbed and name in DIFFERENTIABLE
    )
    out, lse = attn_fwd_p.bind(*arrays, options=replace(options, needs_lse=True))
    results = (out, lse) if options.needs_lse else (out,)
    return results, (_Wanted(wanted), arrays, out, lse)


def _attention_bwd(options, residuals, cotangents):
    wanted, arrays, out, lse = residuals
    if not wanted.names:
        return (tuple(None for _ in arrays),)
    out_grad, *lse_grads = cotangents
    # A cotangent that is zero for certain costs nothing unless it is the only one.
    lse_grads = [g for g in lse_grads if not _is_zero(g)]
    out_grad = jnp.zeros_like(out) if _is_zero(out_grad) else out_grad
    bwd_options = backward_options(options, wanted.names, has_lse_grad=bool(lse_grads))
    gradients = attn_bwd_p.bind(*arrays, out, lse, out_grad, *lse_grads, options=bwd_options)
    by_name = dict(zip(wanted.names, gradients, strict=True))
    return (tuple(by_name.get(name) for name in options.operands),)


def _is_zero(cotangent) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


def _abstract_eval(*avals, options: AttentionOptions):
    spec = AttentionSpec.of(avals, options)
    # `_vary_alike` has made the operands agree on the varying axes of a surrounding shard_map.
    return [
        ShapedArray(x.shape, x.dtype, sharding=sharding, manual_axis_type=avals[0].mat)
        for x, sharding in zip(spec.results, _result_shardings(spec, avals), strict=True)
    ]


def _result_shardings(spec: AttentionSpec, avals) -> list[NamedSharding]:
    """Results are sharded as their operands are: gradients alike, out and lse as query."""
    by_name = dict(zip(spec.options.operands, avals, strict=True))
    if spec.is_backward:
        return [by_name[name].sharding for name in spec.options.gradients]
    sharding = by_name["query"].sharding
    batch, _, heads, _ = sharding.spec
    specs = (P(batch, None, heads, None), P(batch, heads, None))
    return [NamedSharding(sharding.mesh, x) for x in specs[: len(spec.results)]]


def _compute(*operands: jax.Array, options: AttentionOptions, platform: str):
    """The call as the chosen implementation computes it on this platform."""
    spec = AttentionSpec.of(operands, options)
    device = device_for(platform)
    implementation = select.choose(spec, device)
    run = implementation.backward if spec.is_backward else implementation.forward
    return run(spec, device, dict(zip(options.operands, operands, strict=True)))


def _lower(ctx, *operands, options: AttentionOptions, platform: str | None = None):
    # The default rule serves whatever platform has no rule of its own; ctx knows which.
    platform = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    return _lower_as(partial(_compute, options=options, platform=platform), ctx, operands)


def _lower_as(function: Callable[..., Any], ctx, operands):
    """Lower a call as this JAX function of its operands.

    Shardings that are part of types (Explicit mesh axes, shard_map's varying axes) end here: what
    follows is the partitioner's business.
    """
    plain = [ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(function)(ctx.replace(avals_in=plain), *operands)


def _batch(primitive: Primitive, operands: Sequence[jax.Array], dims, *, options: AttentionOptions):
    folded, unfold = fold_batch(options, operands, dims)
    results = unfold(primitive.bind(*folded, options=options))
    return results, [0] * len(results)


@lru_cache(maxsize=4096)
def _bind(primitive: Primitive, options: AttentionOptions) -> Callable[..., list[jax.Array]]:
    return partial(primitive.bind, options=options)


@lru_cache(maxsize=4096)
def _jitted(primitive: Primitive, options: AttentionOptions) -> Callable[..., list[jax.Array]]:
    return jax.jit(_bind(primitive, options))


def _lower_partitioned(ctx, *operands, shard: Primitive, options: AttentionOptions):
    # custom_partitioning under Explicit axes fails to compile with JAX 0.11 and newer.
    is_explicit = AxisType.Explicit in ctx.avals_in[0].sharding.mesh.axis_types

    def call(*operands):
        spec, bind = AttentionSpec.of(operands, options), _bind(shard, options)
        if is_explicit or not can_partition(spec):
            return bind(*operands)
        return partitioned(bind, spec, operands)

    return _lower_as(call, ctx, operands)


def _make_shard_primitive(name: str) -> Primitive:
    """The call on one device: chosen and computed for the platform it is lowered for."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract_eval)
    mlir.register_lowering(primitive, _lower)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, partial(_lower, platform=platform), platform=platform)
    return primitive


def _make_primitive(name: str) -> Primitive:
    """The call as JAX transforms it; lowers to calls of each device's shard."""
    primitive, shard = Primitive(name), _make_shard_primitive(f"{name}_shard")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, options: _jitted(primitive, options)(*operands))
    primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    mlir.register_lowering(primitive, partial(_lower_partitioned, shard=shard))
    # custom_partitioning asks for the devices, which JAX tells a lowering only for primitives that
    # it knows to ask. There is no public way to say so.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


attn_fwd_p = _make_primitive("attn_fwd")
attn_bwd_p = _make_primitive("attn_bwd")
