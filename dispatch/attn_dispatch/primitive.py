"""The JAX primitives attn_fwd and attn_bwd, and the differentiable call made of them.

A primitive takes the operands as arrays and one static parameter, the options. Whatever JAX does
to the call (vmap, sharding, export), its lowering sees the arrays that are really there, makes the
spec of them, and asks `select` who computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from attn_dispatch import select
from attn_dispatch.batching import fold_batch
from attn_dispatch.spec import (
    DIFFERENTIABLE,
    AttentionOptions,
    AttentionSpec,
    backward_options,
)
from attn_dispatch.target import device_for


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(options: AttentionOptions, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """(out,) or, if options.needs_lse, (out, lse): see spec.py for shapes."""
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


attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


def _abstract_eval(*avals, options: AttentionOptions):
    return [
        ShapedArray(result.shape, result.dtype)
        for result in AttentionSpec.of(avals, options).results
    ]


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
    rule = mlir.lower_fun(partial(_compute, options=options, platform=platform))
    return rule(ctx, *operands)


def _batch(primitive: Primitive, operands: Sequence[jax.Array], dims, *, options: AttentionOptions):
    folded, unfold = fold_batch(options, operands, dims)
    results = unfold(primitive.bind(*folded, options=options))
    return results, [0] * len(results)


@lru_cache(maxsize=4096)
def _jitted(primitive: Primitive, options: AttentionOptions):
    return jax.jit(partial(primitive.bind, options=options))


def _make_primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, options: _jitted(primitive, options)(*operands))
    primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    mlir.register_lowering(primitive, _lower)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, partial(_lower, platform=platform), platform=platform)
    return primitive


attn_fwd_p = _make_primitive("attn_fwd")
attn_bwd_p = _make_primitive("attn_bwd")
