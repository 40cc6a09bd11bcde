"""A jaxpr without calls: what `jax.jit` and custom derivatives wrap stands in line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
}
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, its derivatives being those of its operations."""
    return jax.make_jaxpr(lambda *inputs: _evaluate(closed.jaxpr, closed.consts, inputs))(
        *closed.in_avals
    )


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def value(x: Var | Literal) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in _needed(jaxpr):
        given = [value(x) for x in equation.invars]
        inner = _inner(equation)
        if inner is None:
            results = equation.primitive.bind(*given, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        else:
            results = _evaluate(inner.jaxpr, inner.consts, given)
        values |= zip(equation.outvars, results, strict=True)
    return [value(x) for x in jaxpr.outvars]


def _inner(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a call calls."""
    if equation.primitive.name not in _CALLS:
        return None
    inner = next(equation.params[name] for name in _INNER if name in equation.params)
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The operations that the results depend on."""
    wanted = {x for x in jaxpr.outvars if isinstance(x, Var)}
    needed = []
    for equation in reversed(jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        needed.append(equation)
        wanted |= {x for x in equation.invars if isinstance(x, Var)}
    return needed[::-1]
