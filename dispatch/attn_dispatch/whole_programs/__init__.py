"""Whole programs explained: which attention calls a program has, and what would run each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, Mesh

from attn_dispatch import settings
from attn_dispatch.call.foreign_names import hints_at_foreign_names
from attn_dispatch.call.static_arguments import Implementations, check_implementation
from attn_dispatch.core import select
from attn_dispatch.core.explanation import explain_specs
from attn_dispatch.core.jax_compat import without_dead_code
from attn_dispatch.core.traced_calls import sketch_of
from attn_dispatch.devices.target import Target, device_to_explain
from attn_dispatch.devices.target import target as target_block
from attn_dispatch.implementation import Device
from attn_dispatch.warning import warn_of_convention
from attn_dispatch.whole_programs.allowed import Allowed
from attn_dispatch.whole_programs.explained import ProgramCall, ProgramExplanation
from attn_dispatch.whole_programs.other_attention import Fact, OtherCalls
from attn_dispatch.whole_programs.own_calls import OwnCalls, Pair, has_backward
from attn_dispatch.whole_programs.runs import Runs
from attn_dispatch.whole_programs.tracing import is_for_several_devices, traced
from attn_dispatch.whole_programs.walk import walk


def explain_program(
    function: Callable[..., object],
    *args: object,
    target: Target | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> ProgramExplanation:
    """Which attention calls a program makes, and which implementation would run each.

    The program is traced and never runs. Neither the arrays nor the device need to exist:

        tokens = jax.ShapeDtypeStruct((8, 4096), jnp.int32)
        print(explain_program(train_step, params, tokens, target="h100"))

    Args:
      function: the program, such as a training step. It may use or be a result of `jax.jit`,
        `jax.grad`, `jax.vmap`, `jax.shard_map` and the like.
      *args: its arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct` in their places. Leaves
        that are neither, such as numbers, texts and functions, are passed as they are. For keyword
        arguments, pass a `functools.partial` as the function, or a lambda if they are structs.
      target: the device to explain for, as in `attn_dispatch.target`; it need not be present. None
        means the target in force if there is one, otherwise JAX's default device.
      mesh: the mesh in whose `jax.set_mesh` block the program runs, if any. An `AbstractMesh` needs
        no devices.

    Returns:
      A `ProgramExplanation`, which prints as a list: each call with the line that makes it, how
      often it runs, its shapes on one device, and what runs it forward and backward; then attention
      that is no call of attn_dispatch.

    Raises:
      ValueError: the function is none, the target is unknown, or it is None and several are in
        force.
    """
    _check_is_function("explain_program", function)
    with nullcontext() if target is None else target_block(target):
        device = device_to_explain("explain_program")
        # Calls that the program makes in a block with another target are judged for this one.
        with settings.forced({"targets": settings.current().targets}):
            return _explained_for(device, function, args, mesh)


def _explained_for(
    device: Device,
    function: Callable[..., object],
    args: Sequence[object],
    mesh: Mesh | AbstractMesh | None,
) -> ProgramExplanation:
    program = traced(function, args, device, mesh)
    own = OwnCalls(sketch_of(program, device, is_on_mesh=is_for_several_devices(program)))
    others = OtherCalls()

    def rule(equation: JaxprEqn, facts: Sequence[Fact | None], runs: Runs) -> Sequence[Fact | None]:
        if own.note(equation, runs):
            return [None for _ in equation.outvars]
        return others.rule(equation, facts, runs)

    written = program.jaxpr.jaxpr
    kept = without_dead_code(written)
    walk(kept, rule)
    name = getattr(function, "__name__", type(function).__name__)
    calls = tuple(_explained(x, device) for x in own.pairs())
    drops_backward = has_backward(written) and not has_backward(kept)
    return ProgramExplanation(name, device, calls, others.found(), drops_backward)


@hints_at_foreign_names
def assert_kernels(
    function: Callable[..., object],
    *args: object,
    target: Target | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    allow_others: bool = False,
    implementations: Implementations = None,
) -> ProgramExplanation:
    """Check that a vendor's kernel would run every attention of a program, forward and backward.

    For tests on machines without a GPU. The program is traced and never runs:

        def test_the_training_step_runs_on_kernels():
            assert_kernels(train_step, params, tokens, target="h100")

    Args:
      function: the program, as in `explain_program`.
      *args: its arguments, as in `explain_program`.
      target: the device, as in `explain_program`; it must be a GPU.
      mesh: the mesh, as in `explain_program`.
      allow_others: whether the program may also have attention that is no call of attn_dispatch.
      implementations: the name of the implementation that may run a call, or several names; None
        allows every vendor's kernel. "xla" among them allows XLA where the call's own
        `implementation` has "xla", or where it is predicted or measured to be faster, and no
        fallback to it.

    Returns:
      The `ProgramExplanation`.

    Warns:
      AttentionConventionWarning: the function differentiates attention, but nothing that it returns
        depends on a derivative, so that its program has no backward pass of any call.

    Raises:
      AssertionError: with the calls that no allowed kernel runs, or that may be left to XLA when
        the program runs, the reasons, and other attention; or if the program has no attention.
      ValueError: the target is unknown, or no GPU; or an implementation is unknown.
    """
    _check_is_function("assert_kernels", function)
    allowed = Allowed(check_implementation(implementations, select.names(), "implementations"))
    with nullcontext() if target is None else target_block(target):
        found = explain_program(function, *args, mesh=mesh)
    if found.device.platform not in ("cuda", "rocm"):
        raise ValueError(
            f"assert_kernels: expected a GPU as target, got {found.device} (remedy: pass "
            'target="h100", or in a shell --target h100)'
        )
    judged = replace(found, others=()) if allow_others else found
    if not judged.calls and not judged.others:
        if found.others:
            raise AssertionError(
                f"expected a call of attn_dispatch in {found.name}, got only attention that does "
                f"not go through it:\n{found}"
            )
        raise AssertionError(f"expected attention in {found.name}, got none ({_RETURN_IT})")
    if wrong := judged.not_by(allowed):
        remedy = select.remedy_elsewhere(allowed.names, found.device)
        raise AssertionError(
            f"expected {allowed} for every attention, got these without:\n{wrong}"
            + (f"\n\nremedy: {remedy}" if remedy else "")
        )
    if found.lacks_backward:
        warn_of_convention(
            f"assert_kernels: {found.name} differentiates attention, but has no backward pass that "
            "could be checked (remedy: if one is meant, return the gradients or what they update; "
            f"{_RETURN_IT})"
        )
    return found


def _check_is_function(caller: str, function: object) -> None:
    if not callable(function):
        raise ValueError(
            f"{caller}: expected a function, got {function!r:.60}; pass the function itself, and "
            "its arguments behind it"
        )


_RETURN_IT = "what a function does not return is not part of its program"


def _explained(pair: Pair, device: Device) -> ProgramCall:
    call = pair.forward or pair.backward
    assert call is not None
    with settings.within(pair.settings):
        explanation = explain_specs(call, device, pair.forward, pair.backward, pair.share)
    return ProgramCall(pair.place, pair.forward_runs, pair.backward_runs, explanation)
