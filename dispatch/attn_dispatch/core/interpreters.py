"""Rules for the primitives in the tables of jet and checkify."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from attn_dispatch.core.jax_compat import error_checks, jet_rules, name_p, nan_error_check
from attn_dispatch.typed_jax import bind, bind_one, jvp


def make_interpretable(*primitives: Primitive) -> None:
    """Give primitives a Taylor series in jet, and have checkify search their results for NaN."""
    for primitive in primitives:
        jet_rules[primitive] = partial(_series, primitive)
        error_checks[primitive] = partial(nan_error_check, primitive)
    # Derivatives name out and lse for remat, and jet has no rule for a name either.
    jet_rules.setdefault(name_p, partial(_series, name_p))


def _series(
    primitive: Primitive,
    primals: Sequence[jax.Array],
    series: Sequence[Sequence[jax.Array]],
    **params: object,
) -> tuple[list[jax.Array], list[list[jax.Array]]] | tuple[jax.Array, list[jax.Array]]:
    """Results and their Taylor coefficients along a path with the coefficients `series`.

    Each order is the forward-mode derivative of the one before it.
    """
    is_moving = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in primals]

    def along(t: jax.Array) -> list[jax.Array]:
        now = [
            sum((c * (t**k).astype(c.dtype) for k, c in enumerate(terms, 1)), x) if moves else x
            for x, terms, moves in zip(primals, series, is_moving, strict=True)
        ]
        if primitive.multiple_results:
            return list(bind(primitive, *now, **params))
        return [bind_one(primitive, *now, **params)]

    derivatives: list[list[jax.Array]] = []
    function: Callable[[jax.Array], list[jax.Array]] = along
    for k in range(1, len(series[0]) + 1):
        function = partial(_derivative, function)
        derivatives.append([x / math.factorial(k) for x in function(jnp.float32(0))])
    terms = [list(of_result) for of_result in zip(*derivatives, strict=True)]
    results = along(jnp.float32(0))
    return (results, terms) if primitive.multiple_results else (results[0], terms[0])


def _derivative(function: Callable[[jax.Array], list[jax.Array]], t: jax.Array) -> list[jax.Array]:
    """The derivative of each result along t; 0 for a bool or an integer."""
    results, tangents = jvp(function, (t,), (jnp.ones_like(t),))
    return [
        tangent if tangent.dtype == x.dtype else jnp.zeros(x.shape)
        for x, tangent in zip(results, tangents, strict=True)
    ]
