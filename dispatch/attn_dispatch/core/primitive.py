"""The JAX primitives attn_fwd and attn_bwd, and the differentiable call made of them.

A primitive takes the operands as arrays and one static parameter, the options. Whatever JAX does
to the call (vmap, sharding, export), its lowering sees the arrays that are really there, makes the
spec of them, and asks `select` who computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch.call.spec import (
    DIFFERENTIABLE,
    AttentionOptions,
    AttentionSpec,
    as_partners,
    backward_options,
)
from attn_dispatch.core import jax_compat, select
from attn_dispatch.core.batching import fold_batch
from attn_dispatch.core.jax_compat import batching, mlir
from attn_dispatch.core.partitioning import can_partition, partitioned
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Implementation
from attn_dispatch.devices.target import device_for


def attention(options: AttentionOptions, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """out and what else the options ask for; out and lse are differentiable. See spec.py."""
    # jax.custom_vjp forgets the type of what it wraps.
    return cast("tuple[jax.Array, ...]", _attention(options, _vary_alike(operands)))


def _vary_alike(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Under shard_map, what is the same on all devices is made to vary like the rest.

    The transpose of that is a sum over the devices: what the gradient of a shared operand is.
    """
    varying = [jax_compat.varying_axes(x) for x in operands]
    axes = frozenset[str]().union(*varying)
    missing = [tuple(sorted(axes - own)) for own in varying]
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
    forward, _ = _both_options(options, wanted, has_lse_grad=options.needs_lse)
    out, lse, *others = attn_fwd_p.bind(*arrays, options=forward)
    results = (out, lse, *others) if options.needs_lse else (out, *others)
    return results, (_Wanted(wanted), arrays, out, lse)


def _attention_bwd(options, residuals, cotangents):
    wanted, arrays, out, lse = residuals
    if not wanted.names:
        return (tuple(None for _ in arrays),)
    # Of the results, row_max and keep have no gradient: what they are handed is not looked at.
    out_grad, lse_grads = cotangents[0], cotangents[1:2] if options.needs_lse else ()
    if options.dropout_rate:
        # Whether there is one has been decided in the forward pass.
        lse_grads = [jnp.zeros_like(lse) if _is_zero(g) else g for g in lse_grads]
    else:
        # A cotangent that is zero for certain costs nothing unless it is the only one.
        lse_grads = [g for g in lse_grads if not _is_zero(g)]
    out_grad = jnp.zeros_like(out) if _is_zero(out_grad) else out_grad
    _, backward = _both_options(options, wanted.names, has_lse_grad=bool(lse_grads))
    gradients = attn_bwd_p.bind(*arrays, out, lse, out_grad, *lse_grads, options=backward)
    by_name = dict(zip(wanted.names, gradients, strict=True))
    return (tuple(by_name.get(name) for name in options.operands),)


def _both_options(
    options: AttentionOptions, gradients: tuple[str, ...], *, has_lse_grad: bool
) -> tuple[AttentionOptions, AttentionOptions]:
    """The options of the forward call, which keeps its lse, and of the backward call."""
    forward = replace(options, needs_lse=True)
    if not gradients:
        return forward, forward
    return as_partners(forward, backward_options(forward, gradients, has_lse_grad=has_lse_grad))


def _is_zero(cotangent) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


def _abstract_eval(*avals, options: AttentionOptions):
    spec = AttentionSpec.of(avals, options)
    # `_vary_alike` has made the operands agree on the varying axes of a surrounding shard_map.
    return [
        jax_compat.sharded_like(x, sharding, avals[0])
        for x, sharding in zip(spec.results, _result_shardings(spec, avals), strict=True)
    ]


def _result_shardings(spec: AttentionSpec, avals) -> list[NamedSharding]:
    """Results are sharded as their operands are: gradients alike, the others as query."""
    by_name = dict(zip(spec.options.operands, avals, strict=True))
    if spec.is_backward:
        return [by_name[name].sharding for name in spec.options.gradients]
    sharding = by_name["query"].sharding
    batch, _, heads, _ = sharding.spec
    by_row = P(batch, heads, None)
    specs = {
        "out": P(batch, None, heads, None),
        "lse": by_row,
        "row_max": by_row,
        "keep": P(batch, heads, None, None),
    }
    return [NamedSharding(sharding.mesh, specs[name]) for name in spec.result_names]


def _compute(*operands: jax.Array, options: AttentionOptions, platform: str):
    """The call as the chosen implementation computes it on this platform."""
    spec = AttentionSpec.of(operands, options)
    device = device_for(platform)
    implementation = _chosen(spec, device)
    run = implementation.backward if spec.is_backward else implementation.forward
    return run(spec, device, dict(zip(options.operands, operands, strict=True)))


def _chosen(spec: AttentionSpec, device: Device) -> Implementation:
    """Who computes the call: where its dropout mask is wanted, who would without that."""
    if not spec.options.needs_keep:
        return select.choose(spec, device)
    options = replace(spec.options, needs_keep=False)
    name = select.choose(replace(spec, options=options), device).NAME
    # A NotImplementedError if it cannot tell its mask: another's is not the mask of this call.
    named = replace(spec.options, implementation=(name,))
    return select.choose(replace(spec, options=named), device)


def _lower(ctx, *operands, options: AttentionOptions, platform: str | None = None):
    # The default rule serves whatever platform has no rule of its own; ctx knows which.
    platform = platform or jax_compat.platforms_of(ctx)[0]
    return jax_compat.lower_as(partial(_compute, options=options, platform=platform), ctx, operands)


def _batch(primitive: Primitive, operands: Sequence[jax.Array], dims, *, options: AttentionOptions):
    bind = _bind(primitive, options)
    if options.partner is not None and options.gradients:
        num_forward = len(options.partner.operands)
        if all(dim is None for dim in dims[:num_forward]):
            # The forward call is not mapped. One of another shape might be computed, and its
            # dropout mask drawn, by another implementation.
            return _map_calls(bind, operands, dims)
    folded, unfold = fold_batch(options, operands, dims)
    results = unfold(bind(*folded))
    return results, [0] * len(results)


def _map_calls(bind, operands: Sequence[jax.Array], dims):
    """A call after the other, each with its slice of the operands that are mapped."""
    mapped = {i: jnp.moveaxis(operands[i], dim, 0) for i, dim in enumerate(dims) if dim is not None}

    def one(slices: dict[int, jax.Array]):
        return bind(*(slices.get(i, x) for i, x in enumerate(operands)))

    results = jax.lax.map(one, mapped)
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

    return jax_compat.lower_as(call, ctx, operands)


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
    jax_compat.tell_devices_to_lowering_of(primitive)
    return primitive


attn_fwd_p = _make_primitive("attn_fwd")
attn_bwd_p = _make_primitive("attn_bwd")
