"""Values of a mask_mod, by how they depend on s, the position of the key.

A value that does not depend on s is a `Number`. s plus or minus a number is a `Position`. The
comparison of a position with a number holds for a range of keys. What conditions make of ranges is
left to two readings: one range (key_ranges.py), and the union of several (key_sets.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from attn_dispatch.programs.bounded_numbers import (
    FAR,
    Number,
    constant,
    extreme,
    is_nonnegative,
    may_overflow,
    minus,
    plus,
)
from attn_dispatch.programs.inlining import needed
from attn_dispatch.programs.program import INDICES, ModProgram
from attn_dispatch.typed_jax import evaluated, type_of


@dataclass(frozen=True)
class Position:
    """sign * s + more, or its absolute value."""

    sign: int
    more: Number
    is_absolute: bool = False


Borders = tuple[Number | None, Number | None]
"""The keys first <= s < end; None where that side is open."""

Keys = TypeVar("Keys")
"""What a reading has for the keys for which a condition holds."""


class Reading(ABC, Generic[Keys]):
    """Classifies every value of a program by its dependence on s, in one pass.

    A value is None if it depends on s in any way that the reading does not know.
    """

    def __init__(self, program: ModProgram) -> None:
        self._body = program.body
        inputs = program.body.jaxpr.invars
        self._values: dict[Var, Number | Position | Keys | None] = {}
        self._values |= {x: self._known(x, frozenset()) for x in inputs}
        for var, name in zip(inputs, INDICES, strict=False):
            self._values[var] = self._known(var, frozenset(name))
        t, s = inputs[2:4]
        self._values[t] = Number(_position, frozenset("t"), 1, (0, 0))
        self._values[s] = Position(1, constant(0))

    @abstractmethod
    def _between(self, borders: Borders) -> Keys:
        """The keys of a range."""

    @abstractmethod
    def _condition(self, equation: JaxprEqn) -> Keys | None:
        """The result of a logical operation, or of another that the base class does not know."""

    def _read(self) -> Var | Literal:
        """Give every variable a value; returns the program's result."""
        for equation in self._body.jaxpr.eqns:
            given = [self._value(x) for x in equation.invars]
            numbers = [x for x in given if isinstance(x, Number)]
            if len(numbers) == len(given):
                depends = frozenset[str]().union(*(x.depends for x in numbers))
                for out in equation.outvars:
                    known = self._known(out, depends)
                    self._values[out] = _with_span(known, equation, numbers)
            else:
                value = self._dependent_on_s(equation, given)
                self._values |= dict.fromkeys(equation.outvars, value)
        return self._body.jaxpr.outvars[0]

    def _value(self, x: Var | Literal) -> Number | Position | Keys | None:
        return constant(x.val) if isinstance(x, Literal) else self._values[x]

    def _known(self, var: Var, depends: frozenset[str]) -> Number:
        one = self._alone(var)
        return Number(lambda *inputs: evaluated(one, *inputs)[0], depends)

    def _alone(self, var: Var) -> ClosedJaxpr:
        alone = self._body.jaxpr.replace(outvars=[var])
        return ClosedJaxpr(alone.replace(eqns=needed(alone)), self._body.consts)

    def _dependent_on_s(
        self, equation: JaxprEqn, given: Sequence[Number | Position | Keys | None]
    ) -> Position | Keys | None:
        name = equation.primitive.name
        if name in ("convert_element_type", "copy") and isinstance(given[0], Position):
            return given[0] if _holds_positions(equation) else self._condition(equation)
        if any(isinstance(x, Number) and may_overflow(x) for x in given):
            return self._condition(equation)
        if name in ("add", "sub", "neg", "abs"):
            moved = _moved(name, given)
            return self._condition(equation) if moved is None else moved
        if name in _MIRRORED and len(given) == 2:
            borders = compared(name, *given)
            return self._condition(equation) if borders is None else self._between(borders)
        return self._condition(equation)


def none_or_all(holds: Number) -> Number:
    """The number of keys that attend, for a bool that does not depend on s."""
    return Number(lambda *inputs: jnp.where(holds.compute(*inputs), FAR, 0), holds.depends)


def is_logical(equation: JaxprEqn) -> bool:
    """Whether the operation's result is a bool."""
    return type_of(equation.outvars[0]).dtype == np.bool_


def _position(b: jax.Array, n: jax.Array, t: jax.Array, *_: jax.Array) -> jax.Array:
    return t


def _moved(name: str, given: Sequence[object]) -> Position | None:
    """A position after add, sub, neg or abs; None if the result is no position."""
    x, *others = given
    y = others[0] if others else None
    if any(isinstance(z, Position) and z.is_absolute for z in given):
        return None
    if name == "abs" and isinstance(x, Position):
        return replace(x, is_absolute=True)
    if name == "neg" and isinstance(x, Position):
        return Position(-x.sign, minus(x.more))
    if isinstance(y, Number) and isinstance(x, Position):
        return Position(x.sign, plus(x.more, y if name == "add" else minus(y)))
    if isinstance(x, Number) and isinstance(y, Position):
        if name == "add":
            return Position(y.sign, plus(y.more, x))
        return Position(-y.sign, plus(x, minus(y.more)))
    return None


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


def compared(name: str, x: object, y: object) -> Borders | None:
    """The keys for which the comparison of a position with a number holds."""
    if isinstance(x, Number):
        return compared(_MIRRORED[name], y, x)
    if not (isinstance(x, Position) and isinstance(y, Number)):
        return None
    if x.is_absolute:
        if name not in ("lt", "le"):
            return None
        x = replace(x, is_absolute=False)
        both = (compared(name, x, y), compared(_MIRRORED[name], x, minus(y)))
        below, above = (z or (None, None) for z in both)
        return below[0] or above[0], below[1] or above[1]
    if x.sign < 0:
        return compared(_MIRRORED[name], Position(1, minus(x.more)), minus(y))
    border = plus(y, minus(x.more))
    after = plus(border, constant(1))
    return {
        "lt": (None, border),
        "le": (None, after),
        "gt": (after, None),
        "ge": (border, None),
        "eq": (border, after),
    }[name]


def _with_span(known: Number, equation: JaxprEqn, numbers: Sequence[Number]) -> Number:
    """A number that does not depend on s, with the bounds that its operation implies."""
    out = type_of(equation.outvars[0])
    if len(equation.outvars) > 1 or out.shape or not _holds_positions(equation):
        return known
    if any(map(may_overflow, numbers)):
        return known
    match equation.primitive.name:
        case "convert_element_type" | "copy":
            made = numbers[0]
        case "add":
            made = plus(*numbers)
        case "sub":
            made = plus(numbers[0], minus(numbers[1]))
        case "max" | "min":
            made = extreme(
                jnp.maximum if equation.primitive.name == "max" else jnp.minimum, *numbers
            )
        case "rem" if numbers[1].span[0] == numbers[1].span[1] > 0 and is_nonnegative(numbers[0]):
            made = replace(known, span=(0, numbers[1].span[1] - 1))
        case _:
            return known
    return replace(known, of_t=made.of_t, span=made.span)


def _holds_positions(equation: JaxprEqn) -> bool:
    """Whether the operation's result type holds every position and its negative."""
    dtype = type_of(equation.outvars[0]).dtype
    return jnp.issubdtype(dtype, jnp.signedinteger) and dtype.itemsize >= 4
