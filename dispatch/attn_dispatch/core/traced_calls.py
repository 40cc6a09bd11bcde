"""The attention calls among the operations of a traced program, for those who walk through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import jax
from jax.extend.core import JaxprEqn

from attn_dispatch import settings
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.derivatives import attn_jvp_p
from attn_dispatch.core.device_share import DeviceShare
from attn_dispatch.core.formulas import by_formula_p, spec_of_tangents
from attn_dispatch.core.made_once import made_once_p
from attn_dispatch.core.one_device import of_one_device
from attn_dispatch.core.primitive import attn_bwd_p, attn_fwd_p
from attn_dispatch.core.remat import attn_saved_p
from attn_dispatch.core.sketch import Sketch, of_program
from attn_dispatch.core.tangents import derivative_on
from attn_dispatch.devices.device import Device
from attn_dispatch.settings import CallSettings
from attn_dispatch.typed_jax import type_of

FindSketch = Callable[[], Sketch | None]


def sketch_of(program: jax.stages.Traced, device: Device, *, is_on_mesh: bool) -> FindSketch:
    """Finds how XLA will split a program. Only calls along Auto axes ask: it must be lowered."""
    return cache(lambda: of_program(program, device.platform) if is_on_mesh else None)


@dataclass(frozen=True)
class TracedCall:
    """A call in one direction, as an operation of a program makes it."""

    spec: AttentionSpec
    """The call of one device."""
    share: DeviceShare | None
    """Which part of the program's call that is."""
    whole: AttentionSpec
    """The call of all devices; with `context_axis` as if all had the same rows."""
    shardings: Sequence[object]
    """How the operands are sharded, or on a mesh how a formula is split."""
    settings: CallSettings
    """What the `with` blocks around the call set."""

    @property
    def identity(self) -> tuple[AttentionSpec, tuple[object, ...]]:
        """The forward call that this one is or belongs to, and how its operands are sharded."""
        spec = self.whole.without_settings
        options = spec.options.forward
        own = len(options.operands)
        return AttentionSpec(options, spec.operands[:own]), tuple(self.shardings[:own])


def call_of(equation: JaxprEqn, find_sketch: FindSketch) -> TracedCall | None:
    """The call that an operation makes; None if it makes none."""
    if equation.primitive is by_formula_p:
        spec = cast("AttentionSpec", equation.params["spec"])
        return _by_formula(equation, spec, spec.options.settings)
    if equation.primitive not in (attn_fwd_p, attn_bwd_p, attn_jvp_p):
        return None
    options = cast("AttentionOptions", equation.params["options"])
    types = [type_of(x) for x in equation.invars[: len(options.operands)]]
    with settings.within(options.settings):
        if equation.primitive is attn_jvp_p:
            wanted = cast("tuple[str, ...]", equation.params["wanted"])
            derivative = derivative_on(types[0].sharding.mesh)
            spec = spec_of_tangents(types, options, wanted, derivative)
            return _by_formula(equation, spec, options.settings)
        spec, share = of_one_device(types, options, find_sketch)
        whole = LeadingCall.of(types, options).spec
    shardings = [x.sharding for x in types] if _is_sharded(equation) else []
    return TracedCall(spec, share, whole, shardings, options.settings)


def is_part_of_a_call(equation: JaxprEqn) -> bool:
    """Whether an operation is of a call: makes its mask, or keeps what a forward pass saved."""
    return equation.primitive in (made_once_p, attn_saved_p)


def is_backward(equation: JaxprEqn) -> bool:
    """Whether an operation is a backward call."""
    return equation.primitive is attn_bwd_p


def _by_formula(equation: JaxprEqn, spec: AttentionSpec, own: CallSettings) -> TracedCall:
    if not _is_sharded(equation):
        return TracedCall(spec, None, spec, (), own)
    share = DeviceShare("all of it; XLA splits the operations of the formula")
    return TracedCall(spec, share, spec, (share,), own)


def _is_sharded(equation: JaxprEqn) -> bool:
    return type_of(equation.invars[0]).sharding.mesh.size > 1
