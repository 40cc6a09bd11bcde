"""The attention calls of attn_dispatch in a program, each with what its two directions run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

from jax.extend.core import Jaxpr, JaxprEqn

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
from attn_dispatch.core.sketch import Sketch
from attn_dispatch.core.tangents import derivative_on
from attn_dispatch.settings import CallSettings
from attn_dispatch.typed_jax import type_of
from attn_dispatch.whole_programs.places import Place, place_of
from attn_dispatch.whole_programs.runs import Runs, total
from attn_dispatch.whole_programs.walk import bodies


@dataclass
class Calls:
    """The calls at one line whose forward calls agree in meaning, shapes and settings."""

    place: Place | None
    settings: CallSettings
    forward: dict[AttentionSpec, Found] = field(default_factory=dict[AttentionSpec, "Found"])
    """The forward calls, which may differ in their results."""
    backward: dict[AttentionSpec, Found] = field(default_factory=dict[AttentionSpec, "Found"])


@dataclass
class Found:
    """A call in one direction."""

    share: DeviceShare | None
    runs: list[Runs] = field(default_factory=list[Runs])
    """How often the direction runs at each place of the program."""


@dataclass(frozen=True)
class _Key:
    """What a forward call and its backward call have in common, however devices share them."""

    place: Place | None
    settings: CallSettings
    meant: AttentionSpec
    """The forward call of all devices, whatever it returns."""
    sharded: tuple[object, ...]
    """The shardings of the forward call's operands; on a mesh, how a formula is split."""


class OwnCalls:
    """Collects the calls of a program while it is walked."""

    def __init__(self, find_sketch: Callable[[], Sketch | None]) -> None:
        # Only calls along Auto axes need the sketch, for which the program must be lowered.
        self._find_sketch = cache(find_sketch)
        self._found: dict[_Key, Calls] = {}

    def note(self, equation: JaxprEqn, runs: Runs) -> bool:
        """Take the operation if it is a call or a part of one; returns whether it is."""
        if equation.primitive in (made_once_p, attn_saved_p):
            return True  # the arrays of a call's mask, and results that a forward pass saved
        if equation.primitive not in (attn_fwd_p, attn_bwd_p, attn_jvp_p, by_formula_p):
            return False
        own = _settings_of(equation)
        with settings.within(own):
            found = _call_in(equation, self._find_sketch)
        spec, key = found.spec.without_settings, _Key(place_of(equation), own, *found.identity)
        calls = self._found.setdefault(key, Calls(key.place, own))
        specs = calls.backward if spec.is_backward else calls.forward
        runs = replace(runs, again=0) if spec.is_backward else runs
        specs.setdefault(spec, Found(found.share)).runs.append(runs)
        return True

    def pairs(self) -> list[Pair]:
        """Each forward call with the backward call that belongs to it, in order."""
        return [pair for calls in self._found.values() for pair in _paired(calls)]


def has_backward(program: Jaxpr) -> bool:
    """Whether a backward call is anywhere in the program."""
    return any(
        x.primitive is attn_bwd_p or any(has_backward(body.jaxpr) for body in bodies(x))
        for x in program.eqns
    )


@dataclass(frozen=True)
class Pair:
    """A forward call and its backward call; one of them may be missing."""

    place: Place | None
    settings: CallSettings
    share: DeviceShare | None
    """On a mesh: which part of the program's call it is."""
    forward: AttentionSpec | None
    forward_runs: Runs
    backward: AttentionSpec | None
    backward_runs: Runs


def _settings_of(equation: JaxprEqn) -> CallSettings:
    if equation.primitive is by_formula_p:
        return cast("AttentionSpec", equation.params["spec"]).options.settings
    return cast("AttentionOptions", equation.params["options"]).settings


@dataclass(frozen=True)
class _Call:
    spec: AttentionSpec
    """The call of one device."""
    share: DeviceShare | None
    """Which part of the program's call that is."""
    whole: AttentionSpec
    """The call of all devices; with `context_axis` as if all had the same rows."""
    shardings: Sequence[object]
    """Those of the operands, or on a mesh how a formula is split."""

    @property
    def identity(self) -> tuple[AttentionSpec, tuple[object, ...]]:
        """The forward call that this one is or belongs to, and how its operands are sharded."""
        spec = self.whole.without_settings
        options = spec.options.forward
        own = len(options.operands)
        return AttentionSpec(options, spec.operands[:own]), tuple(self.shardings[:own])


def _call_in(equation: JaxprEqn, find_sketch: Callable[[], Sketch | None]) -> _Call:
    types = [type_of(x) for x in equation.invars]
    is_sharded = types[0].sharding.mesh.size > 1
    by_formula = (
        DeviceShare("all of it; XLA splits the operations of the formula") if is_sharded else None
    )
    of_formula = (by_formula,) if is_sharded else ()
    if equation.primitive is by_formula_p:
        spec = cast("AttentionSpec", equation.params["spec"])
        return _Call(spec, by_formula, spec, of_formula)
    options = cast("AttentionOptions", equation.params["options"])
    operands = types[: len(options.operands)]
    if equation.primitive is attn_jvp_p:
        wanted = cast("tuple[str, ...]", equation.params["wanted"])
        derivative = derivative_on(types[0].sharding.mesh)
        spec = spec_of_tangents(operands, options, wanted, derivative)
        return _Call(spec, by_formula, spec, of_formula)
    spec, share = of_one_device(operands, options, find_sketch)
    shardings = [x.sharding for x in operands] if is_sharded else []
    return _Call(spec, share, LeadingCall.of(operands, options).spec, shardings)


def _paired(calls: Calls) -> Sequence[Pair]:
    """A backward call belongs to a forward call that is differentiated."""
    # Stable: calls that are differentiated first, each in the order of the program.
    forward = sorted(
        calls.forward,
        key=lambda x: (x.wanted.derivative is not None, not x.wanted.differentiated),
    )
    backward = list(calls.backward)
    pairs: list[Pair] = []
    nothing = Found(None)
    for i in range(max(len(forward), len(backward))):
        first = forward[i] if i < len(forward) else None
        last = backward[i] if i < len(backward) else None
        there = nothing if first is None else calls.forward[first]
        back = nothing if last is None else calls.backward[last]
        share = back.share if there.share is None else there.share.with_backward(back.share)
        runs = total(there.runs), total(back.runs)
        pairs.append(Pair(calls.place, calls.settings, share, first, runs[0], last, runs[1]))
    return pairs
