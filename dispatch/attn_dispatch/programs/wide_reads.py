"""Programs that read their 16-bit arrays in float32 and convert each number after it is read.

The gradient of such an array is then summed in float32. A sum of thousands of 16-bit numbers would
lose small ones, and a GPU adds 16-bit numbers to memory 25 times slower (H200).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.typing import DTypeLike

from attn_dispatch.programs.inlining import results_of
from attn_dispatch.typed_jax import type_of

_READS = {"gather", "dynamic_slice"}


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether a dtype is a 16-bit floating dtype."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def with_wide_reads(closed: ClosedJaxpr) -> Callable[..., jax.Array]:
    """The program as a function whose arrays may have a wider dtype than it was traced with."""

    def evaluate(*inputs: jax.Array) -> jax.Array:
        values: dict[Var, jax.Array] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= zip(closed.jaxpr.invars, inputs, strict=True)

        def value(x: Var | Literal) -> jax.Array:
            return x.val if isinstance(x, Literal) else _in_program_dtype(values[x], x)

        for equation in closed.jaxpr.eqns:
            given = [value(x) for x in equation.invars]
            if equation.primitive.name in _READS and isinstance(equation.invars[0], Var):
                given[0] = values[equation.invars[0]]
            results = results_of(equation.primitive, given, equation.params)
            made = zip(equation.outvars, results, strict=True)
            values |= {var: _in_program_dtype(x, var) for var, x in made}
        return value(closed.jaxpr.outvars[0])

    return evaluate


def _in_program_dtype(x: jax.Array, var: Var) -> jax.Array:
    """A value in the dtype that the program was traced with."""
    dtype = type_of(var).dtype
    return x.astype(dtype) if is_narrow(dtype) and x.dtype != dtype else x
