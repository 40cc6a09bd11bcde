"""Tracing of a program as the user calls it: some arguments are arrays, others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import Jaxpr

from attn_dispatch.typed_jax import flattened


def traced(function: Callable[..., object], args: Sequence[object]) -> tuple[str, Jaxpr]:
    """The program's name, and the program; nothing is computed.

    Args:
      function: the program.
      args: its arguments. Arrays and structs are traced, all else is passed as it is.
    """
    leaves, rebuilt = flattened(tuple(args))
    where = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]

    def program(*arrays: jax.Array) -> list[object]:
        now = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            now[i] = array
        results, _ = flattened(function(*rebuilt(now)))
        return [x for x in results if isinstance(x, jax.Array)]

    trace = jax.jit(program).trace
    return _name_of(function), trace(*(leaves[i] for i in where)).jaxpr.jaxpr


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _name_of(function: Callable[..., object]) -> str:
    inner = getattr(function, "__wrapped__", function)
    inner = getattr(inner, "func", inner)  # functools.partial
    return getattr(inner, "__qualname__", None) or type(inner).__name__
