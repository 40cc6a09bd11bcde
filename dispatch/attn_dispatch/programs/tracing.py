"""Traces the user's score_mod or mask_mod to a program and the arrays that it reads."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, get_abstract_mesh, use_abstract_mesh
from jax.typing import ArrayLike

from attn_dispatch.programs.functions import MaskMod, ScoreMod
from attn_dispatch.programs.inlining import (
    NO_MESH,
    has_constants,
    has_rules,
    inlined,
    plain_type,
    varies_by_device,
)
from attn_dispatch.programs.program import INDICES, ModProgram
from attn_dispatch.typed_jax import evaluated, flattened, vjp

_EXAMPLE = {
    "score_mod": "def score_mod(score, b, n, t, s): return score - 0.5 * jnp.abs(t - s)",
    "mask_mod": "def mask_mod(b, n, t, s): return s <= t",
}
_RESULT = {"score_mod": "a floating scalar", "mask_mod": "a bool scalar"}
_HOW = "it is called for one pair, such as "
_NOT_THE_CALLERS = tuple(
    str(Path(x).parent) for x in (Path(__file__).parent, jax.__file__, np.__file__)
)
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(frozen=True)
class Mod:
    """A program and its arrays, in order."""

    program: ModProgram
    arrays: tuple[jax.Array, ...]


def trace(
    name: str, function: ScoreMod | MaskMod, arguments: Sequence[object], score_dtype: str
) -> Mod:
    """The program of a score_mod or mask_mod.

    Args:
      name: "score_mod" or "mask_mod".
      function: of scalars: the score (score_mod alone), b, n, t, s, and the arguments.
      arguments: its further arguments: arrays, or pytrees of them.
      score_dtype: the name of the score's dtype.

    Raises:
      ValueError: the function is not a score_mod or mask_mod; the message shows how to write one.
    """
    if not callable(function):
        raise ValueError(f"{name}: expected a function or None, got {_described(name, function)}")
    if not isinstance(arguments, Sequence):
        raise ValueError(f"{name}_args: expected a tuple of arrays, got {arguments!r}")
    takes_score = name == "score_mod"
    _check_arity(name, function, takes_score, len(arguments))
    leaves, unflattened = flattened(tuple(arguments))
    given = [_array(f"{name}_args", x) for x in leaves]

    def of_leaves(*inputs: jax.Array) -> ArrayLike:
        scalars, leaves = inputs[: -len(given) or None], inputs[len(inputs) - len(given) :]
        result = function(*scalars, *unflattened(leaves))
        _check_returned(name, result)
        return result

    scalars = [jax.ShapeDtypeStruct((), jnp.int32) for _ in INDICES]
    if takes_score:
        scalars.insert(0, jax.ShapeDtypeStruct((), score_dtype))
    avals = [*scalars, *(plain_type(jax.typeof(x)) for x in given)]
    with use_abstract_mesh(_mesh_to_trace_under()):
        closed = _traced(name, of_leaves, avals)
    _check_result(name, closed)
    with use_abstract_mesh(NO_MESH):
        body, captured = _without_constants(name, closed)
        jaxpr, text = body, str(body.jaxpr)
        # Without custom derivatives the operations determine the derivative.
        if takes_score and has_rules(closed.jaxpr):
            _check_rules(name, closed)
            jaxpr, _ = _without_constants(name, closed, keeps_rules=True)
            text += "\n" + _derivative_text(jaxpr, len(scalars))
    arrays = (*given, *(_array(f"{name}: a captured array", x) for x in captured))
    if " at 0x" in text:
        raise ValueError(
            f"{name}: expected operations that two processes can compare, got one that holds a "
            f"Python object: {text}"
        )
    shapes = tuple((x.shape, x.dtype.name) for x in arrays)
    return Mod(ModProgram(text, shapes, jaxpr, body), arrays)


def _without_constants(
    name: str, closed: ClosedJaxpr, *, keeps_rules: bool = False
) -> tuple[ClosedJaxpr, list[object]]:
    """The program with its constants as inputs, and the constants.

    Inlining a jitted function reveals the constants that it captured.
    """
    captured: list[object] = []
    while True:
        captured += closed.consts
        closed = inlined(closed, keeps_rules=keeps_rules)
        if not closed.consts:
            break
    if has_constants(closed.jaxpr):
        raise ValueError(
            f"{name}: expected no array that a jitted function has captured inside of a loop, a "
            f"branch or a custom derivative; pass it in {name}_args"
        )
    return closed, captured


def _mesh_to_trace_under() -> AbstractMesh:
    """Under shard_map its mesh, because types then record what varies over devices; else none."""
    mesh = get_abstract_mesh()
    return mesh if mesh.manual_axes else NO_MESH


def _array(what: str, x: object) -> jax.Array:
    try:
        array = jnp.asarray(cast("ArrayLike", x))
    except TypeError as error:
        raise ValueError(f"{what}: expected arrays or pytrees of them, got {x!r}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"{what}: expected numbers, got a PRNG key; pass jax.random.key_data(key), of which "
            "jax.random.wrap_key_data makes a key inside"
        )
    return array


def _check_returned(name: str, result: object) -> None:
    """Refuse a result that is not one array or number; `_check_result` checks its type."""
    leaves = cast("list[object]", jax.tree.leaves(result))
    is_contained = len(leaves) == 1 and leaves[0] is not result
    numbers = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    if is_contained or not all(isinstance(x, numbers) for x in leaves):
        raise ValueError(
            f"{name}: expected {_RESULT[name]} as the result, got a {type(result).__name__}; "
            f"{_HOW}{_EXAMPLE[name]}"
        )


def _check_arity(name: str, function: ScoreMod | MaskMod, takes_score: bool, more: int) -> None:
    names = (*(("score",) if takes_score else ()), *INDICES)
    names += tuple(f"{name}_args[{i}]" for i in range(more))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(
            f"{name}: expected a function of ({', '.join(names)}), got one of "
            f"({', '.join(signature.parameters)})"
        ) from error


def _traced(
    name: str, function: Callable[..., ArrayLike], avals: Sequence[jax.ShapeDtypeStruct]
) -> ClosedJaxpr:
    try:
        closed = jax.make_jaxpr(function)(*avals)
    except _NEEDS_VALUES as error:
        raise ValueError(
            f"{name}: expected operations of jax.numpy on scalars; Python's if, and, or, int() and "
            "NumPy arrays need values that are not known here: write jnp.where, &, |, and "
            f"jnp.asarray(array)[index]{_where(error)}"
        ) from error
    except Exception as error:
        if (expected := _expected(name, error)) is None:
            raise
        raise ValueError(f"{name}: expected {expected}; {error}") from error
    if closed.effects:
        effects = ", ".join(sorted(map(str, closed.effects)))
        raise ValueError(
            f"{name}: expected a function without side effects, such as jax.debug.print, got "
            f"{effects}"
        )
    return closed


def _expected(name: str, error: Exception) -> str | None:
    """What the function should have done instead; None if the error is not JAX's."""
    if isinstance(error, TypeError) and "ndexer" in str(error):
        return "arrays to be indexed with b, n, t, s or other integers"
    # The first has no public name.
    if type(error).__name__ == "ShardingTypeError" or "manual axis types" in str(error):
        return (
            "a captured array to lie whole on every device along Explicit mesh axes and those of "
            f"shard_map; one that is sharded pass in {name}_args"
        )
    return None


def _where(error: Exception) -> str:
    """The line of the caller's code that the error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [x for x in frames if not x.filename.startswith(_NOT_THE_CALLERS)]
    return f" (at {Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _described(name: str, value: object) -> str:
    """A description of a value that is not a function; of an array, its dtype and shape."""
    if not isinstance(value, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return repr(value)
    array = cast("jax.Array", value)
    described = f"an array {array.dtype.name}{list(array.shape)}"
    return described + ("; the argument mask takes those" if name == "mask_mod" else "")


def _check_rules(name: str, closed: ClosedJaxpr) -> None:
    """Refuse custom derivatives that depend on an array which varies over devices.

    Such a rule cannot be traced again without the array.
    """
    if varies_by_device(closed.jaxpr):
        raise ValueError(
            f"{name}: expected no custom derivative beside a captured array that differs between "
            f"the devices of shard_map; pass the array in {name}_args"
        )


def _check_result(name: str, closed: ClosedJaxpr) -> None:
    kind = jnp.floating if name == "score_mod" else jnp.bool_
    results = closed.out_avals
    if len(results) == 1 and results[0].shape == () and jnp.issubdtype(results[0].dtype, kind):
        return
    got = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in results) or "nothing"
    raise ValueError(
        f"{name}: expected {_RESULT[name]} as the result, got {got}; {_HOW}{_EXAMPLE[name]}"
    )


def _derivative_text(closed: ClosedJaxpr, scalars: int) -> str:
    """The operations of the gradient: functions with different custom derivatives must differ."""
    moving = [0, *range(scalars, len(closed.in_avals))]
    moving = [i for i in moving if jnp.issubdtype(closed.in_avals[i].dtype, jnp.floating)]

    def gradient(cotangent: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        def of_moving(*moved: jax.Array) -> jax.Array:
            now = dict(zip(moving, moved, strict=True))
            return evaluated(closed, *(now.get(i, x) for i, x in enumerate(inputs)))[0]

        return vjp(of_moving, *(inputs[i] for i in moving))[1](cotangent)

    try:
        derivative = jax.make_jaxpr(gradient)(closed.out_avals[0], *closed.in_avals)
    except Exception as error:
        # The forward pass may still work: a while loop has no gradient, for example.
        return f"no gradient: {type(error).__name__}"
    return str(inlined(derivative).jaxpr)
