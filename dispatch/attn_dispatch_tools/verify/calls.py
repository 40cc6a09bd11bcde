"""A case as a JAX program: the forward call, and its gradients, under the case's transform."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.primitive import attention, attn_bwd_p, attn_fwd_p
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.compiling import COMPILE_QUICKLY
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from attn_dispatch_tools.verify.ragged_call import ragged
from attn_dispatch_tools.verify.reference import Operands

NamedArrays = dict[str, jax.Array]
ArrayMapping = Mapping[str, Any]
ForwardCall = Callable[[NamedArrays], NamedArrays]


@dataclass(frozen=True)
class CaseProgram:
    """A case's forward call and the gradients of the operands in `gradients`."""

    case: Case
    options: AttentionOptions
    gradients: tuple[str, ...]
    run: Callable[[NamedArrays], NamedArrays]
    """Computes out, lse, …, and the gradients, by name, from all operands and cotangents."""

    @staticmethod
    def of(case: Case, implementation: tuple[str, ...], gradients: tuple[str, ...]) -> CaseProgram:
        """The program that names these implementations, in order of preference."""
        # With dropout, a call that returns lse also has a gradient through it.
        needs_lse = case.lse_grad or case.needs_max or not (case.inference or case.dropout)
        options = case.forward_options(needs_lse=needs_lse, implementation=implementation)
        call = _transformed(case, _forward(case, options))
        return CaseProgram(case, options, gradients, _with_gradients(case, call, gradients))

    @staticmethod
    def keep_mask(case: Case, implementation: tuple[str, ...]) -> CaseProgram:
        """The program that also returns the dropout mask it draws, as "keep"."""
        options = case.forward_options(needs_keep=True, implementation=implementation)
        call = _transformed(case, _forward(case, options))
        return CaseProgram(case, options, (), _with_gradients(case, call, ()))

    def trace(self, arrays: ArrayMapping) -> Any:
        """The traced program, for which no implementation is chosen yet."""
        donated = 0 if self.case.transform == "donate" else ()
        quickly = COMPILE_QUICKLY if jax.default_backend() == "cpu" else None
        jitted = jax.jit(self.run, donate_argnums=donated, compiler_options=quickly)
        return jitted.trace(dict(arrays))

    def compile(self, traced: Any) -> Any:
        """The compiled program of what `trace` returned."""
        return _lowered(traced).compile()

    def run_and_text(self, traced: Any) -> tuple[Callable[[NamedArrays], NamedArrays], str]:
        """A function that runs the traced program, and its lowered text, which names its kernels.

        The compiled text may lack a kernel: XLA drops one whose results it knows, as when a
        mask_mod leaves no pair. An eager case runs operation by operation.
        """
        lowered = _lowered(traced)
        run = self.run if self.case.transform == "eager" else lowered.compile()
        return run, lowered.as_text()


def _lowered(traced: Any) -> Any:
    with warnings.catch_warnings():
        # A donated buffer that no result can use is not a problem here.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return traced.lower()


def numpy_results(run: Callable[[NamedArrays], NamedArrays], operands: Operands) -> Operands:
    """The results of a compiled program, or a function, for these arrays."""
    # jnp.array would compile a copy for every shape. A copy is needed: a program may donate it.
    results = run({name: jax.device_put(np.array(x)) for name, x in operands.items()})
    return {name: np.asarray(x) for name, x in results.items()}


def specs_in(jaxpr: Any) -> list[AttentionSpec]:
    """The specs of all attention calls that a traced program makes, each once."""
    found = {}
    for equation in _equations(jaxpr):
        if equation.primitive in (attn_fwd_p, attn_bwd_p):
            options = equation.params["options"]
            # Arrays of the call's mask may follow its operands.
            avals = [x.aval for x in equation.invars[: len(options.operands)]]
            found[LeadingCall.of(avals, options).spec] = None
    return list(found)


def custom_calls_in(text: str) -> set[str]:
    """The names of this library's custom calls in a lowered program.

    The variants for packed sequences, split keys and wide heads count under the plain name.
    Those that clear rows do not count, because they compute nothing.
    """
    found = re.findall(r"custom_call @(attn_dispatch\w*?)(?:_packed|_split_kv)?\b", text)
    clears = {"attn_dispatch_clear_rows", "attn_dispatch_clear_ends"}
    return {x.replace("_wide_", "_") for x in found} - clears


def custom_calls_of(name: str) -> dict[str, str]:
    """An implementation's custom calls by direction; empty if it makes none."""
    (module,) = (x for x in select.implementations() if x.NAME == name)
    found = {x: getattr(module, f"{x.upper()}_TARGET", None) for x in ("forward", "backward")}
    return {direction: name for direction, name in found.items() if name}


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _forward(case: Case, options: AttentionOptions) -> ForwardCall:
    if case.ragged:
        return ragged(case, options)
    extra = {
        "lse": options.wanted.needs_lse,
        "row_max": options.wanted.needs_max,
        "keep": options.wanted.needs_keep,
    }
    names = ("out", *(name for name, wanted in extra.items() if wanted))

    def call(arrays: NamedArrays) -> NamedArrays:
        called = options
        if case.page:
            called, arrays = paged_options(case, options), in_pages(case, arrays)
        results = attention(called, tuple(arrays[name] for name in called.operands))
        return dict(zip(names, results, strict=True))

    return call


def _with_gradients(case: Case, call: ForwardCall, gradients: tuple[str, ...]) -> ForwardCall:
    def run(arrays: NamedArrays) -> NamedArrays:
        constant = {x: y for x, y in arrays.items() if x in case.operand_names}
        if not gradients:
            return call(constant)

        def outputs(wanted: NamedArrays) -> tuple[tuple[jax.Array, ...], NamedArrays]:
            results = call(constant | wanted)
            differentiated = ("out", "lse") if case.lse_grad else ("out",)
            return tuple(results[x] for x in differentiated), results

        _, pull, results = jax.vjp(outputs, {x: arrays[x] for x in gradients}, has_aux=True)
        cotangents = ("out_grad", "lse_grad") if case.lse_grad else ("out_grad",)
        (grads,) = pull(tuple(arrays[x] for x in cotangents))
        return results | grads

    return run


def _transformed(case: Case, call: ForwardCall) -> ForwardCall:
    if case.transform == "checkpoint":
        return jax.checkpoint(call)
    if case.transform in ("vmap", "scan"):
        return _over_parts(case, call)
    return call  # "jit", "eager" and "donate" concern the whole program


def _over_parts(case: Case, call: ForwardCall) -> ForwardCall:
    """The call, mapped over `case.mapped` equal parts of the batch."""
    m = case.mapped

    def run(arrays: NamedArrays) -> NamedArrays:
        # An array that all batch rows share has a batch axis of 1, and the parts share it too.
        shared = {name: x for name, x in arrays.items() if x.shape[0] == 1}
        parts = {
            name: x.reshape(m, x.shape[0] // m, *x.shape[1:])
            for name, x in arrays.items()
            if name not in shared
        }
        if case.transform == "vmap":
            results = jax.vmap(lambda part: call(part | shared))(parts)
        else:
            _, results = jax.lax.scan(lambda _, part: (None, call(part | shared)), None, parts)
        return {name: x.reshape(-1, *x.shape[2:]) for name, x in results.items()}

    return run
