"""The derivatives of attn_fwd: reverse mode by attn_bwd, all others by formulas.

The derivative of attn_fwd along tangents is the primitive attn_jvp, which is linear in them. Its
transpose is attn_bwd. So `jax.grad` runs attn_fwd and attn_bwd, and attn_jvp is lowered only where
its value is wanted, by `jax.jvp`, `jax.jacfwd` or `jax.linearize`. One implementation has a kernel
for its value, for some calls (tangents.py); no vendor has any for derivatives of attn_jvp and
attn_bwd. The others come from the implementation whose forward pass is also plain JAX (its
`formula`), which JAX can differentiate any number of times.

formulas.py has what is computed by formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from attn_dispatch import settings
from attn_dispatch.call.options import AttentionOptions, both_options
from attn_dispatch.core import jax_compat
from attn_dispatch.core.batching import batch_tangents
from attn_dispatch.core.explicit_axes import with_auto_axes
from attn_dispatch.core.formulas import (
    MAPPED,
    SECOND_ORDER,
    Arrays,
    derivative_along,
    gradients_of_call,
    tangents_of_results,
)
from attn_dispatch.core.jax_compat import Context, MlirValues, ad, batching, mlir
from attn_dispatch.core.mask_arrays import backward_arrays
from attn_dispatch.core.tangents import function_to_lower, may_run_on_kernel
from attn_dispatch.semantics.interval_plan import PlanTiles
from attn_dispatch.typed_jax import bind, named

SAVED_NAME = "context"
"""The name of out and lse for `jax.checkpoint` policies, which other attention calls use too."""

Tangents = Sequence[jax.Array | ad.Zero]


def make_differentiable(forward: Primitive, backward: Primitive) -> None:
    """Give attn_fwd and attn_bwd their derivatives."""
    ad.primitive_jvps[forward] = partial(_forward_jvp, forward)
    ad.primitive_jvps[backward] = partial(_backward_jvp, backward)
    ad.primitive_transposes[forward] = partial(_forward_transpose, forward, backward)
    ad.primitive_transposes[attn_jvp_p] = partial(_transpose, backward)


def chosen_as_in_training(options: AttentionOptions) -> AttentionOptions:
    """The options of a call that is not differentiated, chosen as if it were.

    With dropout its mask must be that of the same call in training, so the choice must also suit
    the backward call for all gradients. One name as `implementation` leaves no choice.
    """
    if not options.meaning.dropout_rate or len(options.meaning.implementation) == 1:
        return options
    wanted = options.differentiable
    _, backward = both_options(options, wanted, has_lse_grad=options.wanted.needs_lse)
    return options.returning(replace(options.wanted, partner=backward))


def _forward_jvp(
    primitive: Primitive,
    operands: Arrays,
    tangents: Arrays,
    *,
    options: AttentionOptions,
    tiles: PlanTiles | None = None,
) -> tuple[Arrays, Tangents]:
    """attn_fwd, which returns its lse, and attn_jvp of the tangents not known to be 0."""
    count = len(options.operands)
    operands, further = operands[:count], operands[count:]
    along = moving_operands(options, tangents[:count])
    if not along:
        results = bind(primitive, *operands, *further, options=options, tiles=tiles)
        return results, [_no_tangent(x) for x in results]
    forward, _ = both_options(options, tuple(along), has_lse_grad=options.wanted.needs_lse)
    results = bind(primitive, *operands, *further, options=forward, tiles=tiles)
    out, lse, *others = results
    if not jax_compat.uses_remat3():  # which has a rule for the call (remat.py)
        out, lse = named(out, SAVED_NAME), named(lse, SAVED_NAME)
    known = out, lse, *others
    if tiles is not None:
        # Made here, they do not depend on the backward pass, and JAX keeps them for all layers.
        further = backward_arrays(options, operands, further, tiles)
    return along_tangents(options, operands, further, known, along, tiles)


def moving_operands(
    options: AttentionOptions, tangents: Sequence[jax.Array | ad.Zero]
) -> dict[str, jax.Array]:
    """The tangents of a forward call's operands that are not known to be 0, by name.

    Raises:
      NotImplementedError: if one is not, and the call is paged.
    """
    if "page_table" in options.operands and not all(map(_is_zero, tangents)):
        raise NotImplementedError(
            "paged_attention has no gradients: it is for serving. For gradients, call "
            "dot_product_attention on keys and values that are not in pages; otherwise put "
            "jax.lax.stop_gradient around the arguments"
        )
    return {
        name: tangent
        for name, tangent in zip(options.operands, tangents, strict=True)
        if name in options.differentiable and not isinstance(tangent, ad.Zero)
    }


def along_tangents(
    options: AttentionOptions,
    operands: Arrays,
    further: Arrays,
    known: Sequence[jax.Array],
    along: dict[str, jax.Array],
    tiles: PlanTiles | None,
) -> tuple[Arrays, Tangents]:
    """The results of a forward call, and their tangents by attn_jvp.

    Args:
      options: the call's options.
      operands: the operands.
      further: what follows those of the backward call (mask_arrays.py).
      known: out, lse and the other results, of the call that also returns lse.
      along: the tangents of operands, by name; at least one.
      tiles: the tiles of `further`.
    """
    out, lse, *others = known
    arrays, wanted = (*operands, out, lse, *further), tuple(along)
    moved = bind(attn_jvp_p, *arrays, *along.values(), options=options, wanted=wanted, tiles=tiles)
    out_tangent, lse_tangent = moved
    # row_max and keep have no gradient.
    no_tangents = [_no_tangent(x) for x in others]
    if not options.wanted.needs_lse:
        return [out, *others], [out_tangent, *no_tangents]
    return [out, lse, *others], [out_tangent, lse_tangent, *no_tangents]


def _transpose(
    backward: Primitive,
    cotangents: Arrays,
    *arrays: jax.Array,
    options: AttentionOptions,
    wanted: tuple[str, ...],
    tiles: PlanTiles | None = None,
) -> list[jax.Array | None]:
    """attn_bwd: the gradients of the operands whose tangents attn_jvp takes."""
    known, tangents = arrays[: -len(wanted)], arrays[-len(wanted) :]
    count = len(options.operands) + 2
    residuals, further = known[:count], known[count:]
    *_, out, lse = residuals
    out_grad, lse_grad = cotangents
    lse_grads = [lse_grad] if options.wanted.needs_lse else []
    if options.meaning.dropout_rate:
        # The forward pass fixed this call's operands: lse_grad is among them even if it is 0.
        lse_grads = [jnp.zeros_like(lse) if _is_zero(g) else g for g in lse_grads]
    else:
        # A cotangent that is known to be zero costs nothing unless it is the only one.
        lse_grads = [g for g in lse_grads if not _is_zero(g)]
    out_grad = jnp.zeros_like(out) if _is_zero(out_grad) else out_grad
    _, options = both_options(options, wanted, has_lse_grad=bool(lse_grads))
    gradients = bind(
        backward, *residuals, out_grad, *lse_grads, *further, options=options, tiles=tiles
    )
    return [None for _ in known] + [
        gradient if ad.is_undefined_primal(tangent) else None
        for gradient, tangent in zip(gradients, tangents, strict=True)
    ]


def _forward_transpose(
    forward: Primitive,
    backward: Primitive,
    cotangents: Arrays,
    *arrays: jax.Array,
    options: AttentionOptions,
    tiles: PlanTiles | None = None,
) -> list[jax.Array | None]:
    """The transpose of attn_fwd, which is linear only in value: value's gradient, for any value."""
    del tiles  # without the arrays that follow the operands, both calls make their own
    operands = arrays[: len(options.operands)]
    unknown = [
        name
        for name, x in zip(options.operands, operands, strict=True)
        if ad.is_undefined_primal(x)
    ]
    if unknown != ["value"]:
        raise NotImplementedError(
            f"jax.linear_transpose: attention is linear in value alone, and not in "
            f"{' and '.join(unknown)}; jax.vjp has the gradients"
        )
    out_grad, *_ = cotangents
    if _is_zero(out_grad):
        return [None for _ in arrays]
    known = [
        jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else x for x in operands
    ]
    first, second = both_options(options, ("value",), has_lse_grad=False)
    results = bind(forward, *known, options=first)
    out, lse, *_ = results
    gradients = bind(backward, *known, out, lse, out_grad, options=second)
    found = [gradients[0] if name == "value" else None for name in options.operands]
    return found + [None for _ in arrays[len(operands) :]]


def _backward_jvp(
    primitive: Primitive,
    operands: Arrays,
    tangents: Arrays,
    *,
    options: AttentionOptions,
    tiles: PlanTiles | None = None,
) -> tuple[Arrays, Tangents]:
    """attn_bwd, and by formulas the derivative of what it computes.

    out and lse are functions of the other operands, so their tangents are not needed.
    """
    gradients = bind(primitive, *operands, options=options, tiles=tiles)
    operands = operands[: len(options.operands)]
    inputs = [i for i, name in enumerate(options.operands) if name not in ("out", "lse")]
    moving = [i for i in inputs if not _is_zero(tangents[i])]
    if not moving:
        return gradients, [_no_tangent(x) for x in gradients]
    _refuse_in_parts(options)

    def gradients_of(*arrays: jax.Array) -> list[jax.Array]:
        return gradients_of_call(options, dict(zip(options.operands, arrays, strict=True)))

    return gradients, derivative_along(gradients_of, operands, tangents, moving, gradients)


def _second_jvp(
    primals: Arrays,
    tangents: Arrays,
    *,
    options: AttentionOptions,
    wanted: tuple[str, ...],
    tiles: PlanTiles | None = None,
) -> tuple[Arrays, Arrays]:
    """attn_jvp, and by formulas the derivative of what it computes."""
    _refuse_in_parts(options)
    results = bind(attn_jvp_p, *primals, options=options, wanted=wanted, tiles=tiles)
    moving = [i for i, tangent in enumerate(tangents) if not _is_zero(tangent)]

    function = partial(tangents_of_results, options=options, wanted=wanted, derivative=SECOND_ORDER)
    return results, derivative_along(function, primals, tangents, moving, results)


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, ad.Zero)


def _no_tangent(x: jax.Array) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _batch_jvp(
    arrays: Arrays,
    dims: Sequence[int | None],
    *,
    options: AttentionOptions,
    wanted: tuple[str, ...],
    tiles: PlanTiles | None = None,
) -> tuple[Arrays, list[int]]:
    _refuse_in_parts(options)
    bound = partial(bind, attn_jvp_p, options=options, wanted=wanted, tiles=tiles)
    with settings.within(options.settings):
        on_kernel = may_run_on_kernel(arrays, dims, options.without_settings, wanted)
    if on_kernel:
        return batch_tangents(bound, arrays, dims, options, wanted)
    # The formula is mapped, not the primitive. If only tangents are mapped, as by jax.jacfwd, what
    # does not depend on them is computed once.
    function = partial(tangents_of_results, options=options, wanted=wanted, derivative=MAPPED)
    n = len(options.operands)
    mapped = jax.vmap(function, tuple(dims))
    mapped = with_auto_axes(mapped, arrays[n : n + 2], dims[n : n + 2])
    return mapped(*arrays), [0, 0]


def _refuse_in_parts(options: AttentionOptions) -> None:
    """Refuse a derivative that only formulas have if devices hold parts of the sequence."""
    if options.meaning.context is not None:
        raise NotImplementedError(
            "with context_axis there are gradients, but no forward-mode and no second derivatives: "
            "call dot_product_attention outside of the shard_map, on arrays that are sharded along "
            "the sequence"
        )


def _lower_jvp(
    ctx: Context,
    *arrays: object,
    options: AttentionOptions,
    wanted: tuple[str, ...],
    tiles: PlanTiles | None = None,
) -> MlirValues:
    del tiles
    _refuse_in_parts(options)
    with settings.within(options.settings):
        function = function_to_lower(ctx, options.without_settings, wanted)
        return jax_compat.lower_as(function, ctx, arrays)


def _make_jvp_primitive() -> Primitive:
    """The primitive attn_jvp, from operands, out, lse, what follows the operands of attn_bwd
    (mask_arrays.py), and the tangents of the operands `wanted`."""
    primitive = Primitive("attn_jvp")
    primitive.multiple_results = True
    jax_compat.run_eagerly(primitive)

    def types(
        *avals: ShapedArray,
        options: AttentionOptions,
        wanted: tuple[str, ...],
        tiles: PlanTiles | None = None,
    ) -> tuple[ShapedArray, ...]:
        del wanted, tiles
        n = len(options.operands)
        return avals[n : n + 2]

    primitive.def_abstract_eval(types)
    ad.primitive_jvps[primitive] = _second_jvp
    batching.primitive_batchers[primitive] = _batch_jvp
    mlir.register_lowering(primitive, _lower_jvp)
    return primitive


attn_jvp_p = _make_jvp_primitive()
