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

_MOST_PAIRS = 2**30
"""XLA is left out of calls with more scores than this."""

Program = Callable[..., Any]


@dataclass
class Contest:
    """A call with its compiled programs, by direction and name."""

    call: TimedCall
    programs: dict[str, dict[str, Program]] = field(default_factory=lambda: {FORWARD: {}, STEP: {}})
    chosen: dict[str, str] = field(default_factory=dict[str, str])
    """By direction, the implementations that the default runs: "flash", or "cudnn+fa4" for a
    forward and a backward pass by different ones."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    compiled: list[Any] = field(default_factory=list[Any])
    """Kept because JAX uses them for calls of the jitted functions."""


def contest(call: TimedCall, device: Device, *, has_peers: bool) -> Contest:
    """Compile everything that can run the call."""
    found = Contest(call)
    arrays = jax.eval_shape(call.arrays)
    shared = {name: x for name, x in call.arguments.items() if name in arrays}
    out_grad = jax.eval_shape(call.out_grad, arrays)
    inputs = (out_grad, *distinct_arrays(shared))
    for direction in (FORWARD, STEP)[: 1 + call.is_training]:
        passes = call.passes(direction)
        names = [x for x in _candidates(passes[0]) if _runs(x, passes, device)]
        chosen = [_default(spec, device) for spec in passes]
        found.chosen[direction] = "+".join(dict.fromkeys(chosen))
        programs: dict[str, Program] = {x: call.program(shared, x, direction) for x in names}
        if found.chosen[direction] not in names:
            programs[DEFAULT] = call.program(shared, None, direction)
        if has_peers:
            programs |= {
                peer.NAME: program
                for peer in PEERS
                if (program := peer.program(call, direction)) is not None
            }
        for name, program in programs.items():
            _compile(found, direction, name, program, inputs)
    return found


def _candidates(spec: AttentionSpec) -> list[str]:
    pairs = spec.batch * spec.num_heads * spec.seq_len_q * spec.seq_len_kv
    return [x for x in select.names() if x != "xla" or pairs <= _MOST_PAIRS]


def _runs(name: str, passes: Sequence[AttentionSpec], device: Device) -> bool:
    if select.named(name).unusable_reason(device):
        return False
    return all(select.by_engine(x.by(name), device, name, "") is not None for x in passes)


def _default(spec: AttentionSpec, device: Device) -> str:
    try:
        return select.choose(spec, device).NAME
    except NotImplementedError:
        return "none"


def _compile(
    found: Contest, direction: str, name: str, program: Program, inputs: Sequence[Any]
) -> None:
    try:
        jitted = jax.jit(program)
        found.compiled.append(jitted.lower(*inputs).compile())
    except Exception as error:  # a peer may raise anything
        found.failed[f"{name}, {direction}"] = first_line(error)
    else:
        found.programs[direction][name] = jitted


def inputs_of(call: TimedCall) -> tuple[jax.Array, ...]:
    """The arrays that the call's programs take."""
    arrays: Mapping[str, jax.Array] = call.arrays()
    return call.out_grad(arrays), *distinct_arrays(arrays)
