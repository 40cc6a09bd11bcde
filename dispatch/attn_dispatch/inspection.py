"""Inspection of public calls: which implementation runs them, their specs, and dropout masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from attn_dispatch.api import dot_product_attention
from attn_dispatch.call.arguments import Arguments, arguments_of, holds_structs
from attn_dispatch.call.foreign_names import check_names, signature_of
from attn_dispatch.call.keywords import CallArguments
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.normal_form import Call
from attn_dispatch.call.options import AttentionOptions, both_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.call_steps import Results, normal_form
from attn_dispatch.core.context.in_shard_map import whole_call
from attn_dispatch.core.device_share import DeviceShare
from attn_dispatch.core.explanation import Explanation, explain_call
from attn_dispatch.core.mask_share import mask_share
from attn_dispatch.core.one_device import of_one_device
from attn_dispatch.core.primitive import attention, attn_bwd_p, attn_fwd_p
from attn_dispatch.core.sketch import Sketch, of_program
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import Target, device_to_explain
from attn_dispatch.devices.target import target as target_block
from attn_dispatch.paged import paged_attention, paged_calls
from attn_dispatch.programs.functions import MaskMod, ScoreMod
from attn_dispatch.programs.program import axes_of
from attn_dispatch.programs.tracing import Mod, trace
from attn_dispatch.ragged import ragged_call, ragged_dot_product_attention
from attn_dispatch.typed_jax import array_type, bind, flattened, is_tracer

Shaped = ArrayLike | jax.ShapeDtypeStruct
"""An array, or a struct with its shape and dtype."""


def dropout_mask(*args: ArrayLike | None, **kwargs: Unpack[CallArguments[ArrayLike]]) -> jax.Array:
    """The dropout mask of a call, from the implementation that runs it.

    For tests, and for computing the same attention elsewhere. The mask is as large as the scores.

    Args:
      *args: the arguments of the call: those of `dot_product_attention`, or with `cu_seqlens_q`
        those of `ragged_dot_product_attention`. The `return_…` arguments are ignored.
      **kwargs: the same, by name.

    Returns:
      bool [B, N, T, S], for packed sequences [N, T, S]: True where a probability is kept, which is
      everywhere if dropout_rate is 0. Unspecified where the query may not attend to the key.

    Raises:
      ValueError: the call is wrong.
      NotImplementedError: the implementation that runs the call cannot return its mask.
    """
    public_call = _public_call(args, kwargs)
    call = public_call.calls_of(replace(public_call.arguments, needs_keep=True))[-1]
    return attention(call.options, call.operands)[-1]


def explain(
    *args: Shaped | None, target: Target | None = None, **kwargs: Unpack[CallArguments[Shaped]]
) -> Explanation:
    """Which implementation would run a call, and why each of the others would not.

    Nothing is computed, and neither the arrays nor the device need to exist:

        q = jax.ShapeDtypeStruct((2, 4096, 32, 128), jnp.bfloat16)
        print(explain(q, q, q, is_causal=True, target="h100"))

    Args:
      *args: the arguments of the call: those of `dot_product_attention`, or with `cu_seqlens_q`
        those of `ragged_dot_product_attention`, or with `page_table=` those of `paged_attention`. A
        `jax.ShapeDtypeStruct` can stand for an array. For a window that is traced in the real call,
        give a struct as that side; an array whose values are known counts as static.
      **kwargs: the same, by name.
      target: the device to explain for, as in `attn_dispatch.target`; it need not be present. None
        means the target in force if there is one, otherwise JAX's default device.

    Returns:
      An `Explanation`, which prints as a table. Both passes are those of a training step: in a
      program without a backward pass, another implementation may run the forward pass, and
      `explain_program` says which. If the arrays are sharded (their `NamedSharding`, which a
      `jax.ShapeDtypeStruct` can have too), or if it has `context_axis`, it explains what one device
      computes; `share` says which part of the call that is, and how many bytes the device receives
      from others in each pass. If no strategy can run a call with `context_axis`, nothing is
      chosen, and `share.refusal` says why.
      `paged_attention` with `cu_seqlens_q` may run as two calls; the one for sequences with a
      single query is in `single_queries`. If the call has a mask_mod whose arrays are not traced,
      `mask` has the shares of pairs that attend and that kernels compute, of the whole call; for
      long calls these are estimates.

    Raises:
      ValueError: the call is wrong, the target is unknown, or it is None and several are in force.
    """
    if target is not None:
        with target_block(target):
            return explain(*args, **kwargs)
    device, call = device_to_explain("explain"), _public_call(args, kwargs)
    explained = partial(explain_call, device=device, has_lse_grad=call.arguments.return_lse)
    calls, sketch = _traced(call, device)
    *singles, found = (explained(*_of_one_device(x, sketch)) for x in calls)
    if singles:
        found = replace(found, single_queries=singles[0])
    mask_mod = _known_mask_mod(call.arguments)
    if mask_mod is None:
        return found
    types, options = calls[-1].forward
    return replace(found, mask=mask_share(whole_call(options, types).spec, mask_mod))


def spec_of(**kwargs: Unpack[CallArguments[Shaped]]) -> AttentionSpec:
    """The spec of a call with these arguments, structs for arrays as in `explain`.

    Raises:
      TypeError, ValueError: the call is wrong.
    """
    return specs_of(**kwargs)[-1]


def specs_of(**kwargs: Unpack[CallArguments[Shaped]]) -> tuple[AttentionSpec, ...]:
    """The specs of the calls that compute the public call, usually one; that of `spec_of` is last.

    Raises:
      TypeError, ValueError: the call is wrong.
    """
    return _specs(_public_call((), kwargs))


@dataclass(frozen=True)
class _PublicCall:
    """A public call with the user's arguments."""

    arguments: Arguments
    calls_of: Callable[[Arguments], tuple[Call, ...]]
    """Returns the calls that compute it, usually one; the one with the longest queries is last."""


def _public_call(args: Sequence[object], kwargs: Mapping[str, object]) -> _PublicCall:
    """The public call that has these arguments, which their names decide."""
    function: Callable[..., Results] = dot_product_attention
    if "key_pages" in kwargs or "page_table" in kwargs:
        function = paged_attention
        if len(args) < 3:  # None may be left out
            kwargs = {"value_pages": None, **kwargs}
    elif "cu_seqlens_q" in kwargs:
        function = ragged_dot_product_attention
    check_names(function, kwargs)
    bound = signature_of(function).bind(*args, **kwargs)
    return _PublicCall(arguments_of(bound), _CALLS_OF[function])


_CALLS_OF: dict[Callable[..., Results], Callable[[Arguments], tuple[Call, ...]]] = {
    dot_product_attention: lambda arguments: (normal_form(arguments),),
    ragged_dot_product_attention: lambda arguments: (ragged_call(arguments),),
    paged_attention: lambda arguments: paged_calls(arguments)[0],
}


def _specs(call: _PublicCall) -> tuple[AttentionSpec, ...]:
    return tuple(LeadingCall.of(*x.forward).spec for x in _traced(call, None)[0])


_Direction = tuple[Sequence[ShapedArray], AttentionOptions]
"""The types of a call's operands, and its options."""


@dataclass(frozen=True)
class _TracedCall:
    forward: _Direction
    backward: _Direction | None
    """None for a paged call, which has no backward pass, and for arrays on one device."""


def _of_one_device(
    call: _TracedCall, sketch: Sketch | None
) -> tuple[AttentionSpec, DeviceShare | None]:
    """The call of one device, and which part of the caller's call that is, in both directions."""
    spec, share = of_one_device(*call.forward, lambda: sketch)
    if share is None or share.refusal or call.backward is None:
        return spec, share
    return spec, share.with_backward(of_one_device(*call.backward, lambda: sketch)[1])


def _traced(call: _PublicCall, device: Device | None) -> tuple[list[_TracedCall], Sketch | None]:
    """The calls that compute a public call, and how the Auto axes of a mesh split them.

    Args:
      call: the public call.
      device: a device of the mesh; None does not ask how they are split.
    """
    given = call.arguments.traceable
    leaves, _ = flattened(given)
    is_sharded = device is not None and any(map(_is_sharded, leaves))
    is_spread = device is not None and (is_sharded or call.arguments.context_axis is not None)
    found: list[_TracedCall] = []

    def attend(traced: dict[str, object]) -> list[list[jax.Array]]:
        results: list[list[jax.Array]] = []
        for x in call.calls_of(replace(call.arguments, **traced)):
            types, backward = [array_type(y) for y in x.operands], None
            if is_spread:
                results.append(bind(attn_fwd_p, *x.operands, options=x.options))
                if "page_table" not in x.options.operands:
                    gradients, backward = _backward(x, has_lse_grad=call.arguments.return_lse)
                    results.append(gradients)
            found.append(_TracedCall((types, x.options), backward))
        return results

    if device is not None and is_sharded and not any(map(is_tracer, leaves)):
        program = jax.jit(attend).trace(given)
        return found, of_program(program, device.platform)
    jax.eval_shape(attend, given)
    # How XLA will split a program that is being traced is not known.
    return found, Sketch() if is_sharded else None


def _backward(call: Call, *, has_lse_grad: bool) -> tuple[list[jax.Array], _Direction]:
    """The gradients of a call, and the backward call that computes them."""
    wanted = call.options.differentiable
    forward, backward = both_options(call.options, wanted, has_lse_grad=has_lse_grad)
    out, lse, *_ = bind(attn_fwd_p, *call.operands, options=forward)
    residuals = {"out": out, "lse": lse, "out_grad": out, "lse_grad": lse}
    names = backward.operands[len(call.operands) :]
    operands = (*call.operands, *(residuals[x] for x in names))
    gradients = bind(attn_bwd_p, *operands, options=backward)
    return gradients, ([array_type(x) for x in operands], backward)


def _is_sharded(x: object) -> bool:
    sharding = array_type(x).sharding if is_tracer(x) else getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def axes_read_by(
    name: str, mod: ScoreMod | MaskMod, read: Sequence[object], dtype: DTypeLike
) -> str:
    """The letters of "bnts" on which the result of a score_mod or mask_mod depends.

    Args:
      name: "score_mod" or "mask_mod".
      mod: the function.
      read: its further arguments.
      dtype: of query.
    """
    return axes_of(trace(name, mod, read, np.promote_types(dtype, np.float32).name).program)


def _known_mask_mod(arguments: Arguments) -> Mod | None:
    """The call's mask_mod, if the arrays that it reads have known values."""
    function, read = arguments.mask_mod, arguments.mask_mod_args
    if function is None or holds_structs(read):
        return None
    mod = trace("mask_mod", function, read, "float32")
    return None if any(isinstance(x, Tracer) for x in mod.arrays) else mod
