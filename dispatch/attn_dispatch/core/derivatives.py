"""The derivatives of attn_fwd: reverse mode by attn_bwd, all others by formulas.

The derivative of attn_fwd along tangents is the primitive attn_jvp, which is linear in them. Its
transpose is attn_bwd. So `jax.grad` runs attn_fwd and attn_bwd, and attn_jvp is lowered only where
its value is wanted, by `jax.jvp`, `jax.jacfwd` or `jax.linearize`. No vendor has kernels for its
value, or for derivatives of attn_jvp and attn_bwd. These come from the implementation whose forward
pass is also plain JAX (its `formula`), which JAX can differentiate any number of times.

Whether formulas may stand in is decided at lowering, as for the call itself: attn_by_formula is an
identity whose lowering asks `select`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions, both_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import jax_compat, select
from attn_dispatch.core.explicit_axes import with_auto_axes
from attn_dispatch.core.jax_compat import Context, MlirValues, ad, batching, mlir
from attn_dispatch.devices.target import device_for
from attn_dispatch.typed_jax import bind, bind_one, jvp, named, vjp

SAVED_NAME = "context"
"""The name of out and lse for `jax.checkpoint` policies, which other attention calls use too."""

FORWARD_MODE = "forward-mode derivative"
SECOND_ORDER = "derivative of a derivative"

Arrays = Sequence[jax.Array]
"""Arrays, and what JAX has in their place: tangents and cotangents that are known to be 0
(`_is_zero`), and operands of a transpose without values (`ad.is_undefined_primal`)."""

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
) -> tuple[Arrays, Tangents]:
    """attn_fwd, which returns its lse, and attn_jvp of the tangents not known to be 0."""
    if "page_table" in options.operands and not all(map(_is_zero, tangents)):
        raise NotImplementedError(
            "paged_attention has no gradients: it is for serving. For gradients, call "
            "dot_product_attention on keys and values that are not in pages; otherwise put "
            "jax.lax.stop_gradient around the arguments"
        )
    along = {
        name: tangent
        for name, tangent in zip(options.operands, tangents, strict=True)
        if name in options.differentiable and not _is_zero(tangent)
    }
    if not along:
        results = bind(primitive, *operands, options=options)
        return results, [_no_tangent(x) for x in results]
    wanted = tuple(along)
    forward, _ = both_options(options, wanted, has_lse_grad=options.wanted.needs_lse)
    results = bind(primitive, *operands, options=forward)
    out, lse, *others = results
    out, lse = named(out, SAVED_NAME), named(lse, SAVED_NAME)
    moved = bind(attn_jvp_p, *operands, out, lse, *along.values(), options=options, wanted=wanted)
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
) -> list[jax.Array | None]:
    """attn_bwd: the gradients of the operands whose tangents attn_jvp takes."""
    known, tangents = arrays[: -len(wanted)], arrays[-len(wanted) :]
    *_, out, lse = known
    out_grad, lse_grad = cotangents
    lse_grads = [lse_grad] if options.wanted.needs_lse else []
    if options.meaning.dropout_rate:
        # The forward pass has decided whether there is one.
        lse_grads = [jnp.zeros_like(lse) if _is_zero(g) else g for g in lse_grads]
    else:
        # A cotangent that is known to be zero costs nothing unless it is the only one.
        lse_grads = [g for g in lse_grads if not _is_zero(g)]
    out_grad = jnp.zeros_like(out) if _is_zero(out_grad) else out_grad
    _, options = both_options(options, wanted, has_lse_grad=bool(lse_grads))
    gradients = bind(backward, *known, out_grad, *lse_grads, options=options)
    return [None for _ in known] + [
        gradient if ad.is_undefined_primal(tangent) else None
        for gradient, tangent in zip(gradients, tangents, strict=True)
    ]


def _forward_transpose(
    forward: Primitive,
    backward: Primitive,
    cotangents: Arrays,
    *operands: jax.Array,
    options: AttentionOptions,
) -> list[jax.Array | None]:
    """The transpose of attn_fwd, which is linear only in value: value's gradient, for any value."""
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
        return [None for _ in operands]
    known = [
        jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else x for x in operands
    ]
    first, second = both_options(options, ("value",), has_lse_grad=False)
    results = bind(forward, *known, options=first)
    out, lse, *_ = results
    gradients = bind(backward, *known, out, lse, out_grad, options=second)
    return [gradients[0] if name == "value" else None for name in options.operands]


def _backward_jvp(
    primitive: Primitive,
    operands: Arrays,
    tangents: Arrays,
    *,
    options: AttentionOptions,
) -> tuple[Arrays, Tangents]:
    """attn_bwd, and by formulas the derivative of what it computes.

    out and lse are functions of the other operands, so their tangents are not needed.
    """
    gradients = bind(primitive, *operands, options=options)
    inputs = [i for i, name in enumerate(options.operands) if name not in ("out", "lse")]
    moving = [i for i in inputs if not _is_zero(tangents[i])]
    if not moving:
        return gradients, [_no_tangent(x) for x in gradients]

    def gradients_of(*arrays: jax.Array) -> list[jax.Array]:
        return _gradients(options, dict(zip(options.operands, arrays, strict=True)))

    return gradients, _along(gradients_of, operands, tangents, moving, gradients)


def _along(
    function: Callable[..., list[jax.Array]],
    arrays: Arrays,
    tangents: Arrays,
    moving: Sequence[int],
    results: Arrays,
) -> list[jax.Array]:
    """The derivative along some tangents of a formula whose results are sharded like `results`."""
    function = with_auto_axes(function, results)

    def of_moving(*moved: jax.Array) -> list[jax.Array]:
        now = dict(zip(moving, moved, strict=True))
        return function(*(now.get(i, x) for i, x in enumerate(arrays)))

    return jvp(of_moving, [arrays[i] for i in moving], [tangents[i] for i in moving])[1]


def _gradients(options: AttentionOptions, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """The gradients that attn_bwd computes, by formulas."""
    has_lse_grad = "lse_grad" in options.operands
    names = options.operands[: options.operands.index("out")]
    call = replace(options, operands=names, wanted=replace(options.wanted, gradients=()))
    function = _formula(
        call, arrays, options.wanted.gradients, SECOND_ORDER, has_lse_grad=has_lse_grad
    )
    (_, lse), pull = vjp(function, *(arrays[name] for name in options.wanted.gradients))
    return list(pull((arrays["out_grad"], arrays.get("lse_grad", jnp.zeros_like(lse)))))


def _tangents(
    *arrays: jax.Array, options: AttentionOptions, wanted: tuple[str, ...], derivative: str
) -> list[jax.Array]:
    """The tangents of out and lse that attn_jvp computes, by formulas."""
    by_name = dict(zip(options.operands, arrays, strict=False))
    function = _formula(options, by_name, wanted, derivative, has_lse_grad=options.wanted.needs_lse)
    moving = [by_name[name] for name in wanted]
    return list(jvp(function, moving, arrays[-len(wanted) :])[1])


def _formula(
    call: AttentionOptions,
    arrays: dict[str, jax.Array],
    wanted: tuple[str, ...],
    derivative: str,
    *,
    has_lse_grad: bool,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """out and lse of a call as a function of the wanted operands, in plain JAX."""
    # With dropout, the partner is that of the forward call whose mask is drawn again.
    forward, _ = both_options(call, wanted, has_lse_grad=has_lse_grad)
    forward = forward.returning(replace(forward.wanted, needs_max=False, needs_keep=False))
    operands = {name: arrays[name] for name in call.operands}
    whole = LeadingCall.of(tuple(operands.values()), forward)
    asked = whole.spec.returning(replace(forward.wanted, derivative=derivative))

    def function(*moving: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = operands | dict(zip(wanted, moving, strict=True))
        now["query"] = bind_one(by_formula_p, now["query"], spec=asked)
        out, lse = whole.unfold(select.formula(whole.spec, whole.fold(now)))
        return out, lse

    return function


def _second_jvp(
    primals: Arrays,
    tangents: Arrays,
    *,
    options: AttentionOptions,
    wanted: tuple[str, ...],
) -> tuple[Arrays, Arrays]:
    """attn_jvp, and by formulas the derivative of what it computes."""
    results = bind(attn_jvp_p, *primals, options=options, wanted=wanted)
    moving = [i for i, tangent in enumerate(tangents) if not _is_zero(tangent)]

    function = partial(_tangents, options=options, wanted=wanted, derivative=SECOND_ORDER)
    return results, _along(function, primals, tangents, moving, results)


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
) -> tuple[Arrays, list[int]]:
    # The formula is mapped, not the primitive. If only tangents are mapped, as by jax.jacfwd, what
    # does not depend on them is computed once.
    function = partial(_tangents, options=options, wanted=wanted, derivative=FORWARD_MODE)
    n = len(options.operands)
    mapped = jax.vmap(function, tuple(dims))
    mapped = with_auto_axes(mapped, arrays[n : n + 2], dims[n : n + 2])
    return mapped(*arrays), [0, 0]


def _lower_jvp(
    ctx: Context, *arrays: object, options: AttentionOptions, wanted: tuple[str, ...]
) -> MlirValues:
    function = partial(_tangents, options=options, wanted=wanted, derivative=FORWARD_MODE)
    return jax_compat.lower_as(function, ctx, arrays)


def _make_jvp_primitive() -> Primitive:
    """The primitive attn_jvp, from operands, out, lse and the tangents of the operands `wanted`."""
    primitive = Primitive("attn_jvp")
    primitive.multiple_results = True
    jax_compat.run_eagerly(primitive)

    def types(
        *avals: ShapedArray, options: AttentionOptions, wanted: tuple[str, ...]
    ) -> tuple[ShapedArray, ...]:
        del wanted
        n = len(options.operands)
        return avals[n : n + 2]

    primitive.def_abstract_eval(types)
    ad.primitive_jvps[primitive] = _second_jvp
    batching.primitive_batchers[primitive] = _batch_jvp
    mlir.register_lowering(primitive, _lower_jvp)
    return primitive


def _make_gate() -> Primitive:
    """An identity whose lowering raises unless formulas may compute the derivative in `spec`."""
    primitive = Primitive("attn_by_formula")
    jax_compat.run_eagerly(primitive)

    def type_of(x: ShapedArray, *, spec: AttentionSpec) -> ShapedArray:
        del spec
        return x

    primitive.def_abstract_eval(type_of)

    def lower(
        ctx: Context, x: object, *, spec: AttentionSpec, platform: str | None = None
    ) -> MlirValues:
        select.allow_formula(spec, device_for(platform or jax_compat.platforms_of(ctx)[0]))
        return [x]

    mlir.register_lowering(primitive, lower)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, partial(lower, platform=platform), platform=platform)

    def jvp(
        primals: Arrays, tangents: Arrays, *, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        return bind_one(primitive, *primals, spec=spec), tangents[0]

    def batch(
        operands: Arrays, dims: Sequence[int | None], *, spec: AttentionSpec
    ) -> tuple[jax.Array, int | None]:
        return bind_one(primitive, *operands, spec=spec), dims[0]

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


attn_jvp_p = _make_jvp_primitive()
by_formula_p = _make_gate()
