"""Whole programs explained: which attention calls a program has, and what would run each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.core import JaxprEqn

from attn_dispatch import settings
from attn_dispatch.core.explanation import explain_specs
from attn_dispatch.core.jax_compat import without_dead_code
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import default_device
from attn_dispatch.devices.target import target as target_block
from attn_dispatch.whole_programs.explained import ProgramCall, ProgramExplanation
from attn_dispatch.whole_programs.own_calls import OwnCalls, Pair
from attn_dispatch.whole_programs.tracing import traced
from attn_dispatch.whole_programs.walk import Runs, walk


def explain_program(
    function: Callable[..., object], *args: object, target: str | None = None
) -> ProgramExplanation:
    """Which attention calls a program makes, and which implementation would run each.

    The program is traced and never runs. Neither the arrays nor the device need to exist:

        tokens = jax.ShapeDtypeStruct((8, 4096), jnp.int32)
        print(explain_program(train_step, params, tokens, target="h100"))

    Args:
      function: the program, such as a training step; `jax.jit`, `jax.grad`, scans, `shard_map` and
        the like may be inside or around it.
      *args: its arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct` in their places. Leaves
        that are neither, such as numbers, texts and functions, are passed as they are.
      target: the device to explain for, as in `attn_dispatch.target`; it need not be present. None
        means the target in force if there is one, otherwise JAX's default device.

    Returns:
      A `ProgramExplanation`, which prints as a list.

    Raises:
      ValueError: the target is unknown, or it is None and several are in force.
    """
    if target is not None:
        with target_block(target):
            return explain_program(function, *args)
    if len(targets := settings.current().targets) > 1:
        raise ValueError(f"explain_program: expected target= with {targets} in force, got None")
    device = default_device()
    own = OwnCalls()

    def rule(equation: JaxprEqn, facts: Sequence[None], runs: Runs) -> Sequence[None]:
        own.note(equation, runs)
        return [None for _ in equation.outvars]

    name, jaxpr = traced(function, args)
    walk(without_dead_code(jaxpr), rule)
    return ProgramExplanation(name, device, tuple(_explained(x, device) for x in own.pairs()))


def _explained(pair: Pair, device: Device) -> ProgramCall:
    call = pair.forward or pair.backward
    assert call is not None
    explanation = explain_specs(call, device, pair.forward, pair.backward)
    return ProgramCall(pair.place, pair.forward_runs, pair.backward_runs, explanation)
