"""Programs evaluated once more, operation by operation.

Inlined, a program has no calls, no operations without effect on the result, and no mesh. With wide
reads it reads its 16-bit arrays in float32 and converts each number after it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.sharding import AbstractMesh, use_abstract_mesh
from jax.typing import DTypeLike

from attn_dispatch.typed_jax import bind, bind_one, type_of

# One program serves every mesh: operations on scalars have no shardings.
NO_MESH = AbstractMesh((), ())

_RULES = {"custom_jvp_call", "custom_vjp_call"}
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint"} | _RULES
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# JAX adds these under shard_map, where one of two arrays is the same on all devices.
_SHARD_MAP_CASTS = {"pvary", "pcast"}
_READS = {"gather", "dynamic_slice"}


def inlined(closed: ClosedJaxpr, *, keeps_rules: bool = False) -> ClosedJaxpr:
    """The same function with all calls inlined, and its constants as further inputs at the end.

    The bodies of loops and branches are inlined as well.

    Args:
      keeps_rules: keep custom derivatives; otherwise the derivatives are those of the operations.
    """
    jaxpr, number = closed.jaxpr, len(closed.in_avals)
    kept = _RULES if keeps_rules else set[str]()
    types = [plain_type(type_of(x)) for x in (*jaxpr.invars, *jaxpr.constvars)]

    def evaluate(*xs: jax.Array) -> list[jax.Array]:
        return _evaluate(jaxpr, xs[number:], xs[:number], kept)

    with use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(evaluate)(*types)


def has_rules(jaxpr: Jaxpr) -> bool:
    """Whether the jaxpr has custom derivatives."""
    return not _RULES.isdisjoint(_operations(jaxpr))


def has_constants(jaxpr: Jaxpr) -> bool:
    """Whether a function inside the jaxpr holds arrays that are not operands."""
    inner = [x for eqn in jaxpr.eqns for value in eqn.params.values() for x in _jaxprs(value)]
    return any(x.consts or has_constants(x.jaxpr) for x in inner)


def varies_by_device(jaxpr: Jaxpr) -> bool:
    """Whether the jaxpr was traced under shard_map with an array that varies over the devices."""
    return not _SHARD_MAP_CASTS.isdisjoint(_operations(jaxpr))


def _operations(jaxpr: Jaxpr) -> Iterator[str]:
    """The names of all operations, including those of functions inside."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in _jaxprs(value):
                yield from _operations(inner.jaxpr)


def plain_type(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    """A type's shape and dtype, without what a mesh adds."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _evaluate(
    jaxpr: Jaxpr,
    constants: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    kept: set[str],
    *,
    is_called: bool = False,
) -> list[jax.Array]:
    values: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def value(x: Var | Literal) -> jax.Array:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in needed(jaxpr):
        given = [value(x) for x in equation.invars]
        # An operation keeps the user's line that wrote it, or called the function that holds it:
        # JAX caches the traces of its own functions, with the line of their first caller.
        line = None if is_called else cast("object", equation.source_info.traceback)
        with source_info_util.user_context(line):
            results = _result(equation, given, kept)
        values |= zip(equation.outvars, results, strict=True)
    return [value(x) for x in jaxpr.outvars]


def _result(equation: JaxprEqn, given: list[jax.Array], kept: set[str]) -> list[jax.Array]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in _SHARD_MAP_CASTS:
        return given
    if primitive.name in _CALLS - kept:
        inner = next(params[name] for name in _INNER if name in params)
        (inner,) = _jaxprs(inner)
        return _evaluate(inner.jaxpr, inner.consts, given, kept, is_called=True)
    if primitive.name not in kept:
        params = {name: _inlined_inside(x, bool(kept)) for name, x in params.items()}
    return results_of(primitive, given, params)


def results_of(
    primitive: Primitive, given: Sequence[jax.Array], params: Mapping[str, object]
) -> list[jax.Array]:
    """The results of an operation of a jaxpr on other operands."""
    to_bind = cast("dict[str, object]", primitive.get_bind_params(params))
    if primitive.multiple_results:
        return bind(primitive, *given, **to_bind)
    return [bind_one(primitive, *given, **to_bind)]


def _inlined_inside(value: object, keeps_rules: bool) -> object:
    """A parameter of a loop or a branch; if it is a function, inlined."""
    if isinstance(value, ClosedJaxpr) and not value.consts:
        return inlined(value, keeps_rules=keeps_rules)
    if type(value) is tuple:
        return tuple(_inlined_inside(x, keeps_rules) for x in cast("tuple[object, ...]", value))
    return value


def _jaxprs(value: object) -> Iterator[ClosedJaxpr]:
    """The functions in a parameter."""
    if isinstance(value, ClosedJaxpr):
        yield value
    elif isinstance(value, Jaxpr):
        yield ClosedJaxpr(value, ())
    elif isinstance(value, tuple | list):
        for x in cast("Sequence[object]", value):
            yield from _jaxprs(x)


def needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The operations that the results depend on."""
    wanted = {x for x in jaxpr.outvars if isinstance(x, Var)}
    needed: list[JaxprEqn] = []
    for equation in reversed(jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        needed.append(equation)
        wanted |= {x for x in equation.invars if isinstance(x, Var)}
    return needed[::-1]


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether a dtype is a 16-bit floating dtype."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def with_wide_reads(closed: ClosedJaxpr) -> Callable[..., jax.Array]:
    """The program as a function whose arrays may have a wider dtype than it was traced with.

    The gradient of such an array is then summed in float32. A sum of thousands of 16-bit numbers
    would lose small ones, and a GPU adds 16-bit numbers to memory 25 times slower (H200).
    """

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
