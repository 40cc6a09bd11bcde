"""What a mask_mod says of pairs of positions, by NumPy: no array of JAX's is made.

Arrays that the mod reads may be traced, so what depends on them is not known. Such a value is two
bounds: the least and the largest number that it may be, as after a minimum with a known number; and
of a condition, whether it must be True and whether it may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any  # noqa: TID251  # NumPy's arrays and numbers of any dtype

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from attn_dispatch.programs.program import ModProgram
from attn_dispatch.typed_jax import type_of

_Known = Any
"""A NumPy array or number of integers, or of floating numbers."""


class _Bounds:
    """The least and the largest value that is possible, of numbers or conditions."""

    def __init__(self, low: _Known, high: _Known) -> None:
        self.low, self.high = low, high


_Value = _Known | _Bounds


def may_attend(program: ModProgram, b: _Known, n: _Known, t: _Known, s: _Known) -> np.ndarray:
    """bool, of the indices' broadcast shape: False where the mask_mod is known to be False."""
    jaxpr = program.body.jaxpr
    values: dict[Var, _Value] = {x: _unknown(x) for x in jaxpr.invars}
    values |= dict(zip(jaxpr.invars, (b, n, t, s), strict=False))
    values |= dict(zip(jaxpr.constvars, program.body.consts, strict=True))

    def read(x: Var | Literal) -> _Value:
        return x.val if isinstance(x, Literal) else values[x]

    with np.errstate(all="ignore"):
        for equation in jaxpr.eqns:
            try:
                value = _computed(equation, [read(x) for x in equation.invars])
            except (ArithmeticError, TypeError, ValueError):  # of a form that is not foreseen here
                value = None
            values |= {x: _unknown(x) if value is None else value for x in equation.outvars}
    may = _bounds(read(jaxpr.outvars[0])).high
    return np.broadcast_to(np.asarray(may, bool), np.broadcast_shapes(*map(np.shape, (b, n, t, s))))


def _computed(equation: JaxprEqn, values: list[_Value]) -> _Value | None:
    """The value of an equation; None if nothing is known of it."""
    name = equation.primitive.name
    if name == "select_n" and len(values) != 3:  # it selects by a number
        return None
    is_exact = all(type_of(x).dtype in _EXACT for x in (*equation.invars, *equation.outvars))
    if is_exact and not any(isinstance(x, _Bounds) for x in values):
        if name == "convert_element_type":
            return np.asarray(values[0]).astype(equation.params["new_dtype"])
        if name in _NUMBERS:
            return _NUMBERS[name](*values)
    bounds = [_bounds(x) for x in values]
    if is_exact and name in _BOUNDED:
        return _BOUNDED[name](*bounds)
    if type_of(equation.outvars[0]).dtype != np.bool_:
        return None
    if name == "select_n":
        condition, no, yes = bounds
        return _or(_and(condition, yes), _and(_not(condition), no))
    return _LOGICAL[name](*bounds) if name in _LOGICAL else None


_EXACT = (np.dtype(bool), np.dtype(np.int32))
"""The dtypes in which NumPy computes exactly what XLA does. Other integers and floating numbers are
rounded, cut off or divided in other ways."""


def _unknown(x: Var) -> _Bounds:
    is_condition = type_of(x).dtype == np.bool_
    return _Bounds(False, True) if is_condition else _Bounds(-np.inf, np.inf)


def _bounds(x: _Value) -> _Bounds:
    return x if isinstance(x, _Bounds) else _Bounds(x, x)


def _and(x: _Bounds, y: _Bounds) -> _Bounds:
    return _Bounds(np.logical_and(x.low, y.low), np.logical_and(x.high, y.high))


def _or(x: _Bounds, y: _Bounds) -> _Bounds:
    return _Bounds(np.logical_or(x.low, y.low), np.logical_or(x.high, y.high))


def _not(x: _Bounds) -> _Bounds:
    return _Bounds(np.logical_not(x.high), np.logical_not(x.low))


_LOGICAL: Mapping[str, Callable[..., _Bounds]] = {"and": _and, "or": _or, "not": _not}


def _least(x: _Bounds, y: _Bounds) -> _Bounds:
    return _Bounds(np.minimum(x.low, y.low), np.minimum(x.high, y.high))


def _largest(x: _Bounds, y: _Bounds) -> _Bounds:
    return _Bounds(np.maximum(x.low, y.low), np.maximum(x.high, y.high))


def _is_less(x: _Bounds, y: _Bounds) -> _Bounds:
    return _Bounds(np.less(x.high, y.low), np.less(x.low, y.high))


def _is_greater(x: _Bounds, y: _Bounds) -> _Bounds:
    return _is_less(y, x)


def _is_not_less(x: _Bounds, y: _Bounds) -> _Bounds:
    return _not(_is_less(x, y))


def _is_not_greater(x: _Bounds, y: _Bounds) -> _Bounds:
    return _not(_is_less(y, x))


def _reshaped(x: _Bounds, *_: _Bounds) -> _Bounds:
    return x


# Sums are not among these: one of a number that is not known may wrap around.
_BOUNDED: Mapping[str, Callable[..., _Bounds]] = {
    "min": _least, "max": _largest, "lt": _is_less, "gt": _is_greater,
    "ge": _is_not_less, "le": _is_not_greater, "broadcast_in_dim": _reshaped, "squeeze": _reshaped,
}  # fmt: skip


_WHERE: Callable[..., _Known] = np.where


def _quotient(x: _Known, y: _Known) -> _Known:
    """Rounds toward zero; by zero it is -1, as in XLA."""
    quotient = np.floor_divide(np.abs(x), np.maximum(np.abs(y), 1))
    return _WHERE(np.equal(y, 0), -1, np.multiply(np.multiply(np.sign(x), np.sign(y)), quotient))


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
