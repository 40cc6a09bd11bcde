"""The bytes that a device receives from others in a traced program, counted in its collectives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from attn_dispatch.typed_jax import type_of


def received(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> float:
    """The bytes that a device receives, the mean over all devices; it sends as many.

    Args:
      jaxpr: the program of each device. Of the branches of a `cond` the one that receives most
        counts, and a `while` counts as one round.
      sizes: the number of devices along each axis.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        total += _of_collective(equation, sizes)
        inner = [received(x, sizes) for x in _bodies(equation)]
        name = equation.primitive.name
        rounds = cast("int", equation.params["length"]) if name == "scan" else 1
        total += max(inner, default=0.0) if name == "cond" else rounds * sum(inner)
    return total


def _of_collective(equation: JaxprEqn, sizes: Mapping[str, int]) -> float:
    name, params = equation.primitive.name, equation.params
    axes = _all_of(params.get("axis_name", params.get("axes", ())))
    devices = math.prod(y for x, y in sizes.items() if x in axes)
    given = sum(map(_bytes, map(type_of, equation.invars)))
    if name == "ppermute":
        pairs = cast("Sequence[tuple[int, int]]", params["perm"])
        return given * sum(a != b for a, b in pairs) / devices
    if name.startswith(("psum", "pmax", "pmin")):  # a reduce-scatter and an all-gather
        return given * 2 * (devices - 1) / devices
    if name.startswith("all_gather"):
        return given * (devices - 1)
    if name in ("all_to_all", "reduce_scatter"):
        return given * (devices - 1) / devices
    return 0.0


def _all_of(value: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)


def _bytes(x: object) -> int:
    if not isinstance(x, ShapedArray):
        return 0
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def _bodies(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for x in _all_of(value):
            if isinstance(x, ClosedJaxpr | Jaxpr):
                yield x.jaxpr if isinstance(x, ClosedJaxpr) else x
