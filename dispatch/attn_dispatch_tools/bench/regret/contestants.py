"""The programs that are timed for one call: each implementation, the default, and JAX peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.devices.device import Device
from attn_dispatch_tools.bench.peers.peer import first_line
from attn_dispatch_tools.bench.regret.peers import PEERS
from attn_dispatch_tools.bench.regret.timed_call import FORWARD, STEP, TimedCall, distinct_arrays

DEFAULT = "default"
"""The call without `implementation=`, where it runs no single implementation's program."""

_HOPELESS = 2.5
"""XLA, whose programs take longest to compile, is left out where its predicted time is this many
times that of the best kernel."""

Program = Callable[..., Any]


@dataclass
class Contest:
    """A call with its compiled programs, by direction and name."""

    call: TimedCall
    programs: dict[str, dict[str, Program]] = field(default_factory=lambda: {FORWARD: {}, STEP: {}})
    chosen: dict[str, str] = field(default_factory=dict[str, str])
    """By direction, the implementation whose program the default is; DEFAULT if it is none's, but
    one of several implementations."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    inputs: tuple[jax.Array, ...] = ()
    """The arrays that the programs take."""
    compiled: list[Any] = field(default_factory=list[Any])
    """Kept because JAX uses them for calls of the jitted functions."""


def contest(call: TimedCall, device: Device, *, has_peers: bool) -> Contest:
    """Compile everything that can run the call."""
    found = Contest(call)
    arrays = jax.eval_shape(call.arrays)
    shared = {name: x for name, x in call.arguments.items() if name in arrays}
    out_grad = jax.eval_shape(call.out_grad, arrays)
    inputs = (out_grad, *distinct_arrays(shared))
    found.inputs = _inputs_of(call)
    for direction in (FORWARD, STEP)[: 1 + call.is_training]:
        passes = call.passes(direction)
        names = [x for x in _candidates(passes, device) if _runs(x, passes, device)]
        programs: dict[str, Program] = {x: call.program(shared, x, direction) for x in names}
        texts = {x: _compile(found, direction, x, y, inputs) for x, y in programs.items()}
        default = call.program(shared, None, direction)
        text = jax.jit(default).lower(*inputs).as_text()
        # Programs of one text are timed once: two times of a program differ by noise alone.
        same = [x for x in names if texts[x] == text]
        found.chosen[direction] = same[0] if same else DEFAULT
        if not same:
            _compile(found, direction, DEFAULT, default, inputs)
        for peer in PEERS if has_peers else ():
            if (program := peer.program(call, direction)) is not None:
                _compile(found, direction, peer.NAME, program, inputs)
    return found


def _candidates(passes: Sequence[AttentionSpec], device: Device) -> list[str]:
    """The implementations worth timing. What has no prediction is."""
    found = [select.ranked(x, device).predictions for x in passes]
    known = set(select.names()).intersection(*found)
    times = {x: sum(passes[x].device for passes in found) for x in known}
    kernels = [us for name, us in times.items() if name != "xla"]
    is_hopeless = bool(kernels) and times.get("xla", 0.0) > _HOPELESS * max(min(kernels), 40.0)
    return [x for x in select.names() if x != "xla" or not is_hopeless]


def _runs(name: str, passes: Sequence[AttentionSpec], device: Device) -> bool:
    if select.named(name).unusable_reason(device):
        return False
    return all(select.by_engine(x.by(name), device, name, "") is not None for x in passes)


def _compile(
    found: Contest, direction: str, name: str, program: Program, inputs: Sequence[Any]
) -> str:
    """Compile a program, and return its text; "" if that fails."""
    try:
        jitted = jax.jit(program)
        lowered = jitted.lower(*inputs)
        found.compiled.append(lowered.compile())
    except Exception as error:  # a peer may raise anything
        found.failed[f"{name}, {direction}"] = first_line(error)
        return ""
    found.programs[direction][name] = jitted
    return lowered.as_text()


def _inputs_of(call: TimedCall) -> tuple[jax.Array, ...]:
    arrays: Mapping[str, jax.Array] = call.arrays()
    return call.out_grad(arrays), *distinct_arrays(arrays)
