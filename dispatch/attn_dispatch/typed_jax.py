"""JAX's functions whose types JAX leaves unknown, with the types that they have here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

X = TypeVar("X")
Y = TypeVar("Y")
R = TypeVar("R")
P = ParamSpec("P")


def bind(primitive: Primitive, *operands: Any, **params: Any) -> list[jax.Array]:
    """The results of a primitive that has several."""
    return cast("list[jax.Array]", primitive.bind(*operands, **params))


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`jax.jit` of a function of arrays alone."""
    return cast("Callable[P, R]", jax.jit(function))


def mapped(function: Callable[[X], Y], xs: X) -> Y:
    """`jax.lax.map`: the results for each slice of xs, one after the other."""
    return cast("Y", jax.lax.map(function, xs))


def vjp(function: Callable[..., R], *primals: Any) -> tuple[R, Callable[[Any], tuple[Any, ...]]]:
    """`jax.vjp`: the results, and the gradients of primals as a function of the results'."""
    return cast(
        "tuple[R, Callable[[Any], tuple[Any, ...]]]",
        jax.vjp(function, *primals),
    )


def evaluated(body: ClosedJaxpr, *inputs: jax.Array) -> list[jax.Array]:
    """The results of a jaxpr."""
    return cast("list[jax.Array]", jaxpr_as_fun(body)(*inputs))


def wrapped_key(words: jax.Array, impl: str | None) -> jax.Array:
    """`jax.random.wrap_key_data`: the typed PRNG key of these words."""
    return cast("jax.Array", jax.random.wrap_key_data(words, impl=impl))


def local_devices(backend: str | None = None) -> list[Any]:
    """JAX's devices in this process. Their attributes differ by platform.

    Raises:
      RuntimeError: JAX has no such backend.
    """
    return cast("list[Any]", jax.local_devices(backend=backend))


def named(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name`: x by a name for policies of `jax.checkpoint`."""
    return cast("jax.Array", ad_checkpoint.checkpoint_name(x, name))


def precision_of(dtype: Any) -> tuple[int, int]:
    """The bits of a floating dtype's exponent and mantissa."""
    facts = cast("Any", jnp.finfo(dtype))
    return facts.nexp, facts.nmant


def is_tracer(x: object) -> bool:
    """Whether a value is known only when the program runs."""
    return isinstance(x, Tracer)
