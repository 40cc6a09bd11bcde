"""Derivatives that no kernel computes, by formulas: out and lse of a call in plain JAX.

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

from attn_dispatch import settings
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.operands import ArrayType
from attn_dispatch.call.options import FORWARD_MODE, AttentionOptions, both_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import jax_compat, select
from attn_dispatch.core.explicit_axes import with_auto_axes
from attn_dispatch.core.jax_compat import Context, MlirValues, ad, batching, mlir
from attn_dispatch.devices.target import device_for, targets_to_check
from attn_dispatch.typed_jax import bind_one, jvp, vjp

MAPPED = f"{FORWARD_MODE} under vmap"
OVER_DEVICES = f"{FORWARD_MODE} over several devices"
FOR_PLATFORMS = f"{FORWARD_MODE} for several platforms"
SECOND_ORDER = "derivative of a derivative"

Arrays = Sequence[jax.Array]
"""Arrays, and what JAX has in their place: tangents and cotangents that are known to be 0
(`ad.Zero`), and operands of a transpose without values (`ad.is_undefined_primal`)."""


def derivative_along(
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


def gradients_of_call(options: AttentionOptions, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """The gradients that attn_bwd computes, by formulas."""
    has_lse_grad = "lse_grad" in options.operands
    names = options.operands[: options.operands.index("out")]
    call = replace(options, operands=names, wanted=replace(options.wanted, gradients=()))
    function = _formula(
        call, arrays, options.wanted.gradients, SECOND_ORDER, has_lse_grad=has_lse_grad
    )
    (_, lse), pull = vjp(function, *(arrays[name] for name in options.wanted.gradients))
    return list(pull((arrays["out_grad"], arrays.get("lse_grad", jnp.zeros_like(lse)))))


def tangents_of_results(
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
    operands = {name: arrays[name] for name in call.operands}
    whole = _forward_call(call, tuple(operands.values()), wanted, has_lse_grad=has_lse_grad)
    asked = _asked(whole, derivative)

    def function(*moving: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = operands | dict(zip(wanted, moving, strict=True))
        now["query"] = bind_one(by_formula_p, now["query"], spec=asked)
        out, lse = whole.unfold(select.formula(whole.spec, whole.fold(now)))
        return out, lse

    return function


def _forward_call(
    call: AttentionOptions,
    operands: Sequence[ArrayType],
    wanted: tuple[str, ...],
    *,
    has_lse_grad: bool,
) -> LeadingCall:
    """The forward call of which a formula computes out and lse."""
    # With dropout, the partner is that of the forward call whose mask is drawn again.
    forward, _ = both_options(call, wanted, has_lse_grad=has_lse_grad)
    forward = forward.returning(replace(forward.wanted, needs_max=False, needs_keep=False))
    return LeadingCall.of(operands, forward)


def _asked(call: LeadingCall, derivative: str) -> AttentionSpec:
    """The spec for which `select` is asked whether formulas may compute a derivative."""
    return call.spec.returning(replace(call.options.wanted, derivative=derivative))


def spec_of_tangents(
    operands: Sequence[ArrayType],
    options: AttentionOptions,
    wanted: tuple[str, ...],
    derivative: str = FORWARD_MODE,
) -> AttentionSpec:
    """The spec for which `select` is asked when attn_jvp is lowered."""
    return _asked(call_of_tangents(operands, options, wanted), derivative)


def call_of_tangents(
    operands: Sequence[ArrayType], options: AttentionOptions, wanted: tuple[str, ...]
) -> LeadingCall:
    """The forward call of which attn_jvp computes the tangents."""
    return _forward_call(options, operands, wanted, has_lse_grad=options.wanted.needs_lse)


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
        name = platform or jax_compat.platforms_of(ctx)[0]
        with settings.within(spec.options.settings):
            for device in (*targets_to_check(name), device_for(name)):
                select.allow_formula(spec.without_settings, device)
        return [x]

    mlir.register_lowering(primitive, lower)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, partial(lower, platform=platform), platform=platform)

    def jvp_rule(
        primals: Arrays, tangents: Arrays, *, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        return bind_one(primitive, *primals, spec=spec), tangents[0]

    def batch(
        operands: Arrays, dims: Sequence[int | None], *, spec: AttentionSpec
    ) -> tuple[jax.Array, int | None]:
        return bind_one(primitive, *operands, spec=spec), dims[0]

    ad.primitive_jvps[primitive] = jvp_rule
    batching.primitive_batchers[primitive] = batch
    return primitive


by_formula_p = _make_gate()
