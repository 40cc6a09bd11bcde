"""The JAX primitives attn_fwd and attn_bwd; derivatives.py differentiates them.

A primitive takes the operands as arrays and one static parameter, the options. Whatever JAX does
to the call (vmap, sharding, export), its lowering sees the actual arrays, makes their spec, and
asks `select` for an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import cast

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import settings
from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import jax_compat, select, sketch
from attn_dispatch.core.batching import Dims, batch_call
from attn_dispatch.core.context import in_shard_map
from attn_dispatch.core.derivatives import (
    attn_jvp_p,
    chosen_as_in_training,
    make_differentiable,
)
from attn_dispatch.core.explicit_axes import explicit_lowering
from attn_dispatch.core.formulas import by_formula_p
from attn_dispatch.core.interpreters import make_interpretable
from attn_dispatch.core.jax_compat import Context, MlirValues, batching, mlir
from attn_dispatch.core.mask_arrays import forward_arrays, mask_of
from attn_dispatch.core.mask_binding import tiles_to_bind
from attn_dispatch.core.partitioning import partitioned, sharding_rule
from attn_dispatch.core.partly_manual import other_axes
from attn_dispatch.core.remat import attn_saved_p, make_saveable
from attn_dispatch.core.sharding_warnings import warn_left_to_xla
from attn_dispatch.core.shards import Shardings
from attn_dispatch.core.tuning import contest
from attn_dispatch.core.whole_call import is_whole_program
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import device_for, targets_to_check
from attn_dispatch.semantics.interval_plan import PlanTiles
from attn_dispatch.semantics.invalid_values import without_nan_lse
from attn_dispatch.typed_jax import bind


def attention(options: AttentionOptions, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """out and the other results that the options name (operands.py). out and lse are
    differentiable."""
    options = replace(options, settings=settings.of_blocks())
    options, operands = chosen_as_in_training(options), jax_compat.vary_alike(operands)
    tiles = tiles_to_bind(options, operands) if select.some_take_masks() else None
    if tiles is None:
        return tuple(bind(attn_fwd_p, *operands, options=options))
    arrays = forward_arrays(options, operands, tiles)
    return tuple(bind(attn_fwd_p, *operands, *arrays, options=options, tiles=tiles))


def _types(
    *avals: ShapedArray, options: AttentionOptions, tiles: PlanTiles | None = None
) -> list[ShapedArray]:
    del tiles
    avals = avals[: len(options.operands)]
    call = LeadingCall.of(avals, options)
    # `vary_alike` has made the operands agree on the varying axes of a surrounding shard_map.
    return [
        jax_compat.sharded_like(x, sharding, avals[0])
        for x, sharding in zip(call.results, _result_shardings(call.spec, avals), strict=True)
    ]


def _types_of_shard(
    *avals: ShapedArray,
    options: AttentionOptions,
    surroundings: settings.Settings,
    tiles: PlanTiles | None = None,
) -> list[ShapedArray]:
    del surroundings
    return _types(*avals, options=options, tiles=tiles)


def _result_shardings(spec: AttentionSpec, avals: Sequence[ShapedArray]) -> list[NamedSharding]:
    given = {x: y.sharding.spec for x, y in zip(spec.options.operands, avals, strict=True)}
    found = Shardings.like_operands(spec, given).results
    return [NamedSharding(avals[0].sharding.mesh, x or P()) for x in found]


def _compute(
    *arrays: jax.Array, options: AttentionOptions, platform: str, tiles: PlanTiles | None
) -> tuple[jax.Array, ...]:
    """The call as the chosen implementation computes it on this platform."""
    count = len(options.operands)
    operands, further = arrays[:count], arrays[count:]
    spec = AttentionSpec.of(operands, options)
    device = device_for(platform)
    for target in targets_to_check(platform):
        _chosen(spec, target)
    named = dict(zip(options.operands, operands, strict=True))
    mask = mask_of(spec, further, tiles) if tiles is not None and further else None
    choice = _chosen(spec, device)
    if spec.is_backward and not choice.skips_invalid_rows(device):
        known = None if mask is None else mask.rows.invalid
        named = without_nan_lse(spec, named, known=known)
    results = choice.compute(device, named, mask)
    is_kernel = choice.implementation.PLATFORM is not None
    if not (is_kernel and spec.wanted.needs_lse) or spec.is_backward:
        return results
    # A scan stores these results for the backward pass. JAX 0.11.2's XLA merges a kernel with the
    # write and, as the layer reads the results too, runs it twice
    # (github.com/openxla/xla/pull/45799). It merges nothing across a barrier.
    return jax.lax.optimization_barrier(results)


def _chosen(spec: AttentionSpec, device: Device) -> select.Choice:
    """The choice for a call.

    If the call returns its dropout mask, it is the choice for the same call without the mask:
    another implementation would draw another mask.
    """
    if not spec.wanted.needs_keep:
        return select.choose(spec, device)
    without = spec.returning(replace(spec.wanted, needs_keep=False))
    name = select.choose(without, device).NAME

    def among(*names: str) -> select.Choice:
        alone = spec.returning(replace(spec.wanted, partner=None))
        return select.choose(alone.by(*names), device)

    # The other names follow: a rewrite that may fall back to XLA at run time needs XLA among them.
    choice = among(*dict.fromkeys((name, *(spec.meaning.implementation or select.names()))))
    # If it cannot return its mask, this raises: another's mask is not the mask of this call.
    return choice if choice.NAME == name else among(name)


def _lower(
    ctx: Context,
    *operands: object,
    options: AttentionOptions,
    surroundings: settings.Settings,
    tiles: PlanTiles | None = None,
    platform: str | None = None,
) -> MlirValues:
    # The default rule serves every platform without a rule; ctx knows which it is.
    platform = platform or jax_compat.platforms_of(ctx)[0]
    surroundings = replace(surroundings, is_exporting=jax_compat.is_export(ctx))
    with settings.restored(surroundings):
        if surroundings.tuning_seconds is not None:
            types = jax_compat.types_of(ctx)[: len(options.operands)]
            contest.tune(AttentionSpec.of(types, options), device_for(platform))
        compute = partial(_compute, options=options, platform=platform, tiles=tiles)
        return jax_compat.lower_as(compute, ctx, operands)


def _batch(
    primitive: Primitive,
    operands: Sequence[jax.Array],
    dims: Dims,
    *,
    options: AttentionOptions,
    tiles: PlanTiles | None = None,
) -> tuple[list[jax.Array], list[int]]:
    return batch_call(_bind(primitive, options, tiles), operands, dims, options)


@lru_cache(maxsize=4096)
def _bind(
    primitive: Primitive, options: AttentionOptions, tiles: PlanTiles | None
) -> Callable[..., list[jax.Array]]:
    return partial(bind, primitive, options=options, tiles=tiles)


@lru_cache(maxsize=4096)
def _shard(primitive: Primitive, tiles: PlanTiles | None) -> Bind:
    """The calls of one device, with arrays of masks in these tiles."""
    further = {} if tiles is None else {"tiles": tiles}

    @lru_cache(maxsize=4096)
    def bind_options(options: AttentionOptions) -> Callable[..., list[jax.Array]]:
        def bind_shard(*operands: jax.Array) -> list[jax.Array]:
            # XLA may lower the shard after a `with` block of settings has ended.
            now = settings.current()
            return cast(
                "list[jax.Array]",
                primitive.bind(*operands, options=options, surroundings=now, **further),
            )

        return bind_shard

    return bind_options


def _lower_with_settings(
    ctx: Context,
    *operands: object,
    primitive: Primitive,
    shard: Primitive,
    options: AttentionOptions,
    tiles: PlanTiles | None = None,
) -> MlirValues:
    with settings.within(options.settings):
        return _lower_partitioned(ctx, operands, primitive, shard, options, tiles)


def _lower_partitioned(
    ctx: Context,
    operands: Sequence[object],
    primitive: Primitive,
    shard: Primitive,
    options: AttentionOptions,
    tiles: PlanTiles | None,
) -> MlirValues:
    """Lower a call whose settings are in force."""
    own, options = options, options.without_settings
    if options.meaning.context is not None:
        # Pieces are calls like any other: mesh axes that are not manual may split them further.
        compute = partial(_spread_over_devices, partial(_bind, primitive, tiles=None), options)
        return jax_compat.lower_typed_as(compute, ctx, operands)
    bind = _shard(shard, tiles)
    whole = LeadingCall.of(jax_compat.types_of(ctx)[: len(options.operands)], options)
    mesh = jax_compat.types_of(ctx)[0].sharding.mesh
    kinds = set(mesh.axis_types)
    # Types say how a call is split, unless there are both Auto and Explicit axes. Then the
    # partitioner decides for all of them.
    types_say = AxisType.Explicit in kinds and AxisType.Auto not in kinds
    # Inside a shard_map over all axes, the call is what one device computes. Inside one over some
    # axes, XLA splits its own operations along the others, but not a kernel.
    in_shard_map = AxisType.Manual in kinds
    others = other_axes(mesh) if in_shard_map and not types_say else None
    if others is not None and not (jax_compat.uses_shardy() and _has_kernel(ctx, whole.spec)):
        others = None
    if (drawn := sketch.current.get()) is not None:
        has_rule = not types_say and (others is not None or not in_shard_map)
        return drawn.open_call(ctx, operands, own, sharding_rule if has_rule else None, others)
    if types_say:
        return explicit_lowering(bind, ctx, operands, options)

    if in_shard_map:
        devices = 1 if others is None else others.size
    else:
        devices = jax_compat.number_of_devices(ctx)
    found = None
    if devices > 1:
        # An export cannot hold the Python function that partitions a call.
        is_export = jax_compat.is_export(ctx)
        found = None if is_export else jax_compat.with_devices(ctx, others or mesh, devices)
        if found is None:
            warn_left_to_xla(whole.spec, others, is_export=is_export)

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        if found is None:
            return whole.results_by(bind, operands)
        return partitioned(bind, whole, operands, is_in_group=others is not None)

    now = settings.current()
    # On the machine of a target, or of an exported program, the host's time is not known.
    is_here = devices == 1 and not now.targets and not jax_compat.is_export(ctx)
    is_alone = is_here and is_whole_program(operands, options)
    with settings.restored(replace(now, is_alone=is_alone)):
        return jax_compat.lower_as(call, found or ctx, operands)


def _spread_over_devices(
    bind: Bind, options: AttentionOptions, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    return in_shard_map.results(bind, options, operands)


def _has_kernel(ctx: Context, spec: AttentionSpec) -> bool:
    """Whether a kernel runs the call on a platform that it is lowered for."""
    gpus = (device_for(x) for x in jax_compat.platforms_of(ctx) if x in ("cuda", "rocm"))
    return not spec.is_empty and any(select.has_kernel(spec, gpu) for gpu in gpus)


def _make_shard_primitive(name: str) -> Primitive:
    """The primitive of a call on one device, for the platform that it is lowered for."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_types_of_shard)
    mlir.register_lowering(primitive, _lower)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, partial(_lower, platform=platform), platform=platform)
    return primitive


def _make_primitive(name: str) -> Primitive:
    """The primitive that JAX transforms; it lowers to the calls of the devices' shards."""
    primitive, shard = Primitive(name), _make_shard_primitive(f"{name}_shard")
    primitive.multiple_results = True
    jax_compat.run_eagerly(primitive)
    primitive.def_abstract_eval(_types)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    # Not cached: a cached rule does not see where the operands come from. The shard's rule is.
    rule = partial(_lower_with_settings, primitive=primitive, shard=shard)
    mlir.register_lowering(primitive, rule, cacheable=False)
    return primitive


attn_fwd_p = _make_primitive("attn_fwd")
attn_bwd_p = _make_primitive("attn_bwd")
make_differentiable(attn_fwd_p, attn_bwd_p)
make_saveable(attn_fwd_p)
make_interpretable(attn_fwd_p, attn_bwd_p, attn_jvp_p, attn_saved_p, by_formula_p)
