"""JAX's functions whose types JAX leaves unknown, with the types that they have here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar, TypeVarTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Literal, Primitive, Var, jaxpr_as_fun
from jax.typing import DTypeLike

X = TypeVar("X")
Y = TypeVar("Y")
R = TypeVar("R")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")


def bind_one(primitive: Primitive, *operands: object, **params: object) -> jax.Array:
    """The result of a primitive that has one."""
    return cast("jax.Array", primitive.bind(*operands, **params))


def bind(primitive: Primitive, *operands: object, **params: object) -> list[jax.Array]:
    """The results of a primitive that has several. A parameter of None is left out."""
    given = {name: x for name, x in params.items() if x is not None}
    return cast("list[jax.Array]", primitive.bind(*operands, **given))


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`jax.jit` of a function of arrays alone."""
    return cast("Callable[P, R]", jax.jit(function))


def mapped(function: Callable[[X], Y], xs: X) -> Y:
    """`jax.lax.map`: the results for each slice of xs, one after the other."""
    return cast("Y", jax.lax.map(function, xs))


def vjp(function: Callable[[*Ts], R], *primals: *Ts) -> tuple[R, Callable[[R], tuple[*Ts]]]:
    """`jax.vjp`: the results, and the gradients of primals as a function of the results'."""
    return cast("tuple[R, Callable[[R], tuple[*Ts]]]", jax.vjp(function, *primals))


def jvp(
    function: Callable[..., R], primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[R, R]:
    """`jax.jvp`: the results, and their derivative along the tangents."""
    return cast("tuple[R, R]", jax.jvp(function, list(primals), list(tangents)))


def flattened(tree: object) -> tuple[list[object], Callable[[Sequence[object]], Iterable[object]]]:
    """The leaves of a pytree, and a function that makes the same container of other leaves."""
    leaves, structure = cast("tuple[list[object], object]", jax.tree.flatten(tree))
    return leaves, lambda others: cast("Iterable[object]", jax.tree.unflatten(structure, others))


def type_of(x: Var | Literal) -> ShapedArray:
    """The shape and dtype of a value of a jaxpr."""
    return cast("ShapedArray", x.aval)


def array_type(x: object) -> ShapedArray:
    """`jax.typeof`: the shape, dtype and sharding of an array that may be traced."""
    return cast("ShapedArray", jax.typeof(x))


def evaluated(body: ClosedJaxpr, *inputs: jax.Array) -> list[jax.Array]:
    """The results of a jaxpr."""
    return cast("list[jax.Array]", jaxpr_as_fun(body)(*inputs))


def wrapped_key(words: jax.Array, impl: str | None) -> jax.Array:
    """`jax.random.wrap_key_data`: the typed PRNG key of these words."""
    return cast("jax.Array", jax.random.wrap_key_data(words, impl=impl))


class JaxDevice(Protocol):
    """What is read of a `jax.Device`, which has no types."""

    platform: str
    device_kind: str
    local_hardware_id: int
    client: JaxClient
    compute_capability: str
    """GPUs alone have this attribute."""
    core_count: int
    """NVIDIA's GPUs alone have this attribute."""

    def memory_stats(self) -> Mapping[str, int] | None: ...


class JaxClient(Protocol):
    """What is read of a client of XLA, which has no types either."""

    platform_version: str

    def devices(self) -> Sequence[JaxDevice]: ...


def local_devices(backend: str | None = None) -> list[JaxDevice]:
    """JAX's devices in this process. Their attributes differ by platform.

    Raises:
      RuntimeError: JAX has no such backend.
    """
    return cast("list[JaxDevice]", jax.local_devices(backend=backend))


def named(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name`: x by a name for policies of `jax.checkpoint`."""
    return cast("jax.Array", ad_checkpoint.checkpoint_name(x, name))


def precision_of(dtype: DTypeLike) -> tuple[int, int]:
    """The bits of a floating dtype's exponent and mantissa."""
    facts = cast("np.finfo[np.floating]", jnp.finfo(dtype))
    return facts.nexp, facts.nmant


def relative_step(dtype: DTypeLike) -> float:
    """The difference between 1 and the next number of a floating dtype."""
    return float(cast("np.finfo[np.floating]", jnp.finfo(dtype)).eps)


def is_tracer(x: object) -> bool:
    """Whether a value is known only when the program runs."""
    return isinstance(x, Tracer)
