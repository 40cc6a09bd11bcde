"""What a mask_mod says of pairs of positions, by NumPy: no array of JAX's is made.

Arrays that the mod reads may be traced, so what depends on them is not known: neither surely True
nor surely False. A condition is therefore two arrays, where it may be True and where it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from attn_dispatch.programs.program import ModProgram
from attn_dispatch.typed_jax import type_of

_Known = Any
"""A NumPy array or number of integers, or of floating numbers."""


class _Condition:
    """Where a condition may be True, and where it must be."""

    def __init__(self, may: _Known, must: _Known) -> None:
        self.may, self.must = may, must


_UNKNOWN = _Condition(True, False)
"""Stands for every value that is not known, whatever its dtype."""

_Value = _Known | _Condition


def may_attend(program: ModProgram, b: _Known, n: _Known, t: _Known, s: _Known) -> np.ndarray:
    """bool, of the indices' broadcast shape: False where the mask_mod is known to be False."""
    jaxpr = program.body.jaxpr
    values: dict[Var, _Value] = dict.fromkeys(jaxpr.invars, _UNKNOWN)
    values |= dict(zip(jaxpr.invars, (b, n, t, s), strict=False))
    values |= dict(zip(jaxpr.constvars, program.body.consts, strict=True))

    def read(x: Var | Literal) -> _Value:
        return x.val if isinstance(x, Literal) else values[x]

    with np.errstate(all="ignore"):
        for equation in jaxpr.eqns:
            try:
                found = _computed(equation, [read(x) for x in equation.invars])
            except (ArithmeticError, TypeError, ValueError):  # of a form that is not foreseen here
                found = _UNKNOWN
            values |= dict.fromkeys(equation.outvars, found)
    may = _as_condition(read(jaxpr.outvars[0])).may
    return np.broadcast_to(np.asarray(may, bool), np.broadcast_shapes(*map(np.shape, (b, n, t, s))))


def _computed(equation: JaxprEqn, values: list[_Value]) -> _Value:
    name = equation.primitive.name
    if name == "select_n" and len(values) != 3:  # it selects by a number
        return _UNKNOWN
    are_known = not any(isinstance(x, _Condition) for x in values)
    if are_known and all(type_of(x).dtype in _EXACT for x in (*equation.invars, *equation.outvars)):
        if name == "convert_element_type":
            return np.asarray(values[0]).astype(equation.params["new_dtype"])
        if name in _NUMBERS:
            return _NUMBERS[name](*values)
    if type_of(equation.outvars[0]).dtype != np.bool_:
        return _UNKNOWN
    conditions = [_as_condition(x) for x in values]
    if name == "select_n":
        condition, no, yes = conditions
        return _or(_and(condition, yes), _and(_not(condition), no))
    return _LOGICAL[name](*conditions) if name in _LOGICAL else _UNKNOWN


_EXACT = (np.dtype(bool), np.dtype(np.int32))
"""The dtypes in which NumPy computes exactly what XLA does. Other integers and floating numbers are
rounded, cut off or divided in other ways."""


def _as_condition(x: _Value) -> _Condition:
    return x if isinstance(x, _Condition) else _Condition(x, x)


def _and(x: _Condition, y: _Condition) -> _Condition:
    return _Condition(np.logical_and(x.may, y.may), np.logical_and(x.must, y.must))


def _or(x: _Condition, y: _Condition) -> _Condition:
    return _Condition(np.logical_or(x.may, y.may), np.logical_or(x.must, y.must))


def _not(x: _Condition) -> _Condition:
    return _Condition(np.logical_not(x.must), np.logical_not(x.may))


_LOGICAL: Mapping[str, Callable[..., _Condition]] = {"and": _and, "or": _or, "not": _not}


_WHERE: Callable[..., _Known] = np.where


def _quotient(x: _Known, y: _Known) -> _Known:
    """Rounds toward zero; by zero it is -1, as in XLA."""
    found = np.floor_divide(np.abs(x), np.maximum(np.abs(y), 1))
    return _WHERE(np.equal(y, 0), -1, np.multiply(np.multiply(np.sign(x), np.sign(y)), found))


def _remainder(x: _Known, y: _Known) -> _Known:
    """Has the sign of x; by zero it is x, as in XLA."""
    return _WHERE(np.equal(y, 0), x, np.fmod(x, _WHERE(np.equal(y, 0), 1, y)))


def _clamped(low: _Known, x: _Known, high: _Known) -> _Known:
    return np.minimum(np.maximum(x, low), high)


def _selected(condition: _Known, no: _Known, yes: _Known) -> _Known:
    return _WHERE(condition, yes, no)


def _same(x: _Known, *_: _Known) -> _Known:
    return x


_NUMBERS: dict[str, Callable[..., _Known]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "sign": np.sign, "div": _quotient, "rem": _remainder,
    "clamp": _clamped, "select_n": _selected, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "broadcast_in_dim": _same,
    "squeeze": _same, "copy": _same,
}  # fmt: skip
