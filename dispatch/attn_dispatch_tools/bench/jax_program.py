"""A compiled call of a JAX function: the times of its first run, its memory, and its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax

from attn_dispatch.core.tuning.timing import seconds_per_call
from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.device_time import busy_seconds


class JaxProgram:
    """The `MeasuredProgram` of a JAX function in one direction."""

    def __init__(
        self,
        function: Callable[..., jax.Array],
        layout: str,
        further_arrays: Sequence[jax.Array],
        direction: str,
        arrays: CellArrays,
    ):
        self._arrays, self._layout, self._direction = arrays, layout, direction
        inputs = arrays.inputs(layout)
        step, self._arguments = _step(function, inputs, tuple(further_arrays), direction)
        self._jitted = jax.jit(step)
        times = [time.perf_counter()]
        traced = self._jitted.trace(*self._arguments)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        # As long as this is referenced, JAX uses it for calls of the jitted function as well.
        self._compiled = lowered.compile()
        times.append(time.perf_counter())
        jax.block_until_ready(self._compiled(*self._arguments))
        times.append(time.perf_counter())
        steps = [1e3 * (b - a) for a, b in pairwise(times)]
        names = ("trace", "lower", "compile", "run")
        self.facts: dict[str, Any] = {
            "first_call_ms": {"total": sum(steps)} | dict(zip(names, steps, strict=True)),
            "memory_bytes": _memory_bytes(self._compiled),
        }

    def seconds(self, calls: int) -> float:
        return seconds_per_call(self._jitted, self._arguments, calls)

    def device_seconds(self, calls: int) -> tuple[float | None, str]:
        def run() -> None:
            result = None
            for _ in range(calls):
                result = self._jitted(*self._arguments)
            jax.block_until_ready(result)

        run()
        total, reason = busy_seconds(run)
        return None if total is None else total / calls, reason

    def results(self) -> list[jax.Array]:
        """The call's output, gradients or both, each as [rows, heads, dim] without padding."""
        found = jax.tree.leaves(self._jitted(*self._arguments))
        return self._arrays.without_padding(found, self._layout)


def _step(
    function: Callable[..., jax.Array],
    inputs: Sequence[jax.Array],
    further_arrays: tuple[jax.Array, ...],
    direction: str,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to jit, and its arguments."""
    *qkv, out_grad = inputs

    def out_and_vjp(*operands: jax.Array):
        qkv, further_arrays = operands[:3], operands[3:]
        return jax.vjp(lambda *qkv: function(*qkv, *further_arrays), *qkv)

    def forward(*operands: jax.Array):
        return function(*operands)

    def backward(pull: Callable[..., Any], out_grad: jax.Array):
        return pull(out_grad)

    def forward_backward(out_grad: jax.Array, *operands: jax.Array):
        out, pull = out_and_vjp(*operands)
        return out, *pull(out_grad)

    if direction == "forward":
        return forward, (*qkv, *further_arrays)
    if direction == "forward_backward":
        return forward_backward, (out_grad, *qkv, *further_arrays)
    # `pull` holds the residuals. As it is an argument, the forward pass does not run again.
    return backward, (jax.jit(lambda *x: out_and_vjp(*x)[1])(*qkv, *further_arrays), out_grad)


def _memory_bytes(compiled: Any) -> int | None:
    """Bytes of results and of XLA's temporary buffers, which include a custom call's workspace.

    Memory that a kernel allocates or takes from XLA's pool while it runs is not counted.
    """
    found = compiled.memory_analysis()
    if found is None:
        return None
    return found.temp_size_in_bytes + found.output_size_in_bytes
