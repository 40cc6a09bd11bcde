"""The attention calls of attn_dispatch in a program, each with what its two directions run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jax.extend.core import Jaxpr, JaxprEqn

from attn_dispatch.core.device_share import DeviceShare
from attn_dispatch.core.traced_calls import FindSketch, call_of, is_backward, is_part_of_a_call
from attn_dispatch.implementation import AttentionSpec
from attn_dispatch.settings import CallSettings
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

    def __init__(self, find_sketch: FindSketch) -> None:
        self._find_sketch = find_sketch
        self._found: dict[_Key, Calls] = {}

    def note(self, equation: JaxprEqn, runs: Runs) -> bool:
        """Take the operation if it is a call or a part of one; returns whether it is."""
        if is_part_of_a_call(equation):
            return True
        found = call_of(equation, self._find_sketch)
        if found is None:
            return False
        spec = found.spec.without_settings
        key = _Key(place_of(equation), found.settings, *found.identity)
        calls = self._found.setdefault(key, Calls(key.place, key.settings))
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
        is_backward(x) or any(has_backward(body.jaxpr) for body in bodies(x)) for x in program.eqns
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
