"""Finds the range of keys, first <= s < end, that a mask_mod lets each query attend to.

Most masks are such a range: a window, a prefix, chunks, lengths. A range costs a kernel at most two
comparisons, however the mask was written. Where first or end follow the diagonal it is a band, and
the kernel computes the band's tiles alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from attn_dispatch.programs.bounded_numbers import (
    FAR,
    Number,
    constant,
    extreme,
    extreme_of_given,
    is_nonnegative,
    may_overflow,
    minus,
    near,
    plus,
)
from attn_dispatch.programs.inlining import inlined
from attn_dispatch.programs.nodes import XlaArray
from attn_dispatch.programs.program import INDICES, ModProgram
from attn_dispatch.typed_jax import evaluated, type_of


@dataclass(frozen=True)
class KeyRange:
    """The keys first <= s < end; None where that side is open."""

    first: Number | None = None
    end: Number | None = None
    ends: tuple[Number, ...] = ()
    """The numbers that `end` is the minimum of, if there are several."""
    rest: tuple[ClosedJaxpr, ...] = ()
    """Further conditions that are not ranges, each a body of the program's inputs. They hold no
    variables of the program: caches may return the range of an equal program, with other ones."""

    @property
    def band(self) -> tuple[int | None, int | None]:
        """The narrowest window around the diagonal, (left, right), that contains the range."""
        left = right = None
        if self.first is not None and self.first.of_t == 1 and self.first.span[0] > -inf:
            left = max(-int(self.first.span[0]), 0)
        if self.end is not None and self.end.of_t == 1 and self.end.span[1] < inf:
            right = max(int(self.end.span[1]) - 1, 0)
        return left, right

    @property
    def row_end(self) -> Number | None:
        """The number of keys that all queries of a batch row may attend to, if the range is that
        and the band; else None."""
        ends = [x for x in self.ends or (self.end,) if x is not None]
        of_rows = [x for x in ends if x.offset is None]
        if self.rest or not of_rows or any(x.of_t or x.depends - {"b"} for x in of_rows):
            return None
        # A window contains the diagonal.
        if any(x.offset is not None and x.offset < 1 for x in ends):
            return None
        if self.first is not None and (self.first.offset is None or self.first.offset > 0):
            return None
        return reduce(partial(extreme_of_given, jnp.minimum), of_rows)

    @property
    def is_band(self) -> bool:
        """Whether the range is exactly the window `band`."""
        left, right = self.band
        has_first = self.first is None or (left is not None and self.first.offset == -left)
        has_end = self.end is None or (right is not None and self.end.offset == right + 1)
        return has_first and has_end and not self.rest


@dataclass(frozen=True)
class _Position:
    """sign * s + more, or its absolute value."""

    sign: int
    more: Number
    is_absolute: bool = False


@dataclass(frozen=True)
class _Hole:
    """All keys outside a range."""

    keys: KeyRange


_Value = Number | _Position | KeyRange | _Hole | None
"""A value of a mask_mod, by how it depends on s; None if in any other way."""


@lru_cache(maxsize=1024)
def key_range(program: ModProgram) -> KeyRange:
    """The range of a mask_mod; if it has none, an open range with the whole mask as `rest`."""
    return _Reading(program).result()


def _position(b: jax.Array, n: jax.Array, t: jax.Array, *_: jax.Array) -> jax.Array:
    return t


class _Reading:
    """Classifies every value of a program by its dependence on s, in one pass."""

    def __init__(self, program: ModProgram) -> None:
        self._body = program.body
        inputs = program.body.jaxpr.invars
        self._values: dict[Var, _Value] = {x: self._known(x, frozenset()) for x in inputs}
        for var, name in zip(inputs, INDICES, strict=False):
            self._values[var] = self._known(var, frozenset(name))
        t, s = inputs[2:4]
        self._values[t] = Number(_position, frozenset("t"), 1, (0, 0))
        self._values[s] = _Position(1, constant(0))

    def result(self) -> KeyRange:
        for equation in self._body.jaxpr.eqns:
            given = [self._value(x) for x in equation.invars]
            numbers = [x for x in given if isinstance(x, Number)]
            if len(numbers) == len(given):
                depends = frozenset[str]().union(*(x.depends for x in numbers))
                for out in equation.outvars:
                    known = self._known(out, depends)
                    self._values[out] = _with_span(known, equation, given)
            else:
                self._values |= dict.fromkeys(
                    equation.outvars, self._dependent_on_s(equation, given)
                )
        return self._as_range(self._body.jaxpr.outvars[0])

    def _value(self, x: Var | Literal) -> _Value:
        return constant(x.val) if isinstance(x, Literal) else self._values[x]

    def _known(self, var: Var, depends: frozenset[str]) -> Number:
        one = self._alone(var)
        return Number(lambda *inputs: evaluated(one, *inputs)[0], depends)

    def _alone(self, var: Var) -> ClosedJaxpr:
        return ClosedJaxpr(self._body.jaxpr.replace(outvars=[var]), self._body.consts)

    def _as_range(self, x: Var | Literal) -> KeyRange:
        value = self._value(x)
        if isinstance(value, Number):
            return KeyRange(end=_none_or_all(value))
        if isinstance(value, KeyRange):
            return value
        assert isinstance(x, Var)
        return KeyRange(rest=(self._alone(x),))

    def _dependent_on_s(self, equation: JaxprEqn, given: list[_Value]) -> _Value:
        name = equation.primitive.name
        if name in ("convert_element_type", "copy"):
            keeps = isinstance(given[0], _Position) and _holds_positions(equation)
            return given[0] if keeps else None
        if any(isinstance(x, Number) and may_overflow(x) for x in given):
            return None
        is_bool = type_of(equation.outvars[0]).dtype == np.bool_
        if name == "and" and is_bool:
            return _both(*(self._as_range(x) for x in equation.invars))
        if name == "or" and is_bool:
            return _either(*(self._as_range(x) for x in equation.invars))
        if name == "not" and isinstance(given[0], KeyRange | _Hole):
            return _opposite(given[0])
        if name in ("add", "sub", "neg", "abs"):
            return _moved(name, given)
        if name in _MIRRORED and len(given) == 2:
            return _compared(name, *given)
        return None


def _none_or_all(holds: Number) -> Number:
    """The number of keys that attend, for a bool that does not depend on s."""
    return Number(lambda *inputs: jnp.where(holds.compute(*inputs), FAR, 0), holds.depends)


def _moved(name: str, given: list[_Value]) -> _Value:
    """A position after add, sub, neg or abs; None if the result is no position."""
    x, *others = given
    y = others[0] if others else None
    if any(isinstance(z, _Position) and z.is_absolute for z in given):
        return None
    if name == "abs" and isinstance(x, _Position):
        return replace(x, is_absolute=True)
    if name == "neg" and isinstance(x, _Position):
        return _Position(-x.sign, minus(x.more))
    if isinstance(y, Number) and isinstance(x, _Position):
        return _Position(x.sign, plus(x.more, y if name == "add" else minus(y)))
    if isinstance(x, Number) and isinstance(y, _Position):
        if name == "add":
            return _Position(y.sign, plus(y.more, x))
        return _Position(-y.sign, plus(x, minus(y.more)))
    return None


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


def _compared(name: str, x: _Value, y: _Value) -> _Value:
    """The keys for which the comparison of a position with a number holds."""
    if isinstance(x, Number):
        return _compared(_MIRRORED[name], y, x)
    if not (isinstance(x, _Position) and isinstance(y, Number)):
        return None
    if x.is_absolute:
        if name not in ("lt", "le"):
            return None
        both = [
            _compared(name, replace(x, is_absolute=False), y),
            _compared(_MIRRORED[name], replace(x, is_absolute=False), minus(y)),
        ]
        below, above = (z for z in both if isinstance(z, KeyRange))
        return KeyRange(below.first or above.first, below.end or above.end)
    if x.sign < 0:
        opposite = _Position(1, minus(x.more))
        return _compared(_MIRRORED[name], opposite, minus(y))
    border = plus(y, minus(x.more))
    after = plus(border, constant(1))
    return {
        "lt": KeyRange(end=border),
        "le": KeyRange(end=after),
        "gt": KeyRange(first=after),
        "ge": KeyRange(first=border),
        "eq": KeyRange(border, after),
    }[name]


def _both(x: KeyRange, y: KeyRange) -> KeyRange:
    first = extreme_of_given(jnp.maximum, x.first, y.first)
    ends = tuple(z for one in (x, y) for z in one.ends or (one.end,) if z is not None)
    return KeyRange(first, extreme_of_given(jnp.minimum, x.end, y.end), ends, x.rest + y.rest)


def _either(x: KeyRange, y: KeyRange) -> KeyRange | _Hole | None:
    """The keys of either range, if that is a range or the outside of one for all numbers."""
    if x.rest or y.rest:
        return None
    if x.first is None and y.first is None and x.end and y.end:
        return KeyRange(end=extreme_of_given(jnp.maximum, x.end, y.end))
    if x.end is None and y.end is None and x.first and y.first:
        return KeyRange(first=extreme_of_given(jnp.minimum, x.first, y.first))
    others = [z for z in (_opposite(x), _opposite(y)) if isinstance(z, KeyRange)]
    return _Hole(_both(*others)) if len(others) == 2 else None


def _opposite(x: KeyRange | _Hole) -> KeyRange | _Hole | None:
    if isinstance(x, _Hole):
        return x.keys
    if x.rest:
        return None
    if (x.first is None) != (x.end is None):
        return KeyRange(first=x.end, end=x.first)
    return _Hole(x)


def _with_span(known: Number, equation: JaxprEqn, given: list[_Value]) -> Number:
    """A number that does not depend on s, with the bounds that its operation implies."""
    numbers = [x for x in given if isinstance(x, Number)]
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
    return dtype.kind == "i" and dtype.itemsize >= 4


def xla_array_of(number: Number, mask_mod: ModProgram) -> XlaArray:
    """A number as an array that XLA computes, clipped to int32 beyond every position."""
    types = [jax.ShapeDtypeStruct((), jnp.int32) for _ in INDICES]
    types += [jax.ShapeDtypeStruct(*array) for array in mask_mod.arrays]

    def clipped(*inputs: jax.Array) -> jax.Array:
        return near(number.compute(*inputs))

    body = inlined(jax.make_jaxpr(clipped)(*types))
    axes = "".join(x for x in "bnt" if x in number.depends)
    return XlaArray(body, str(body.jaxpr), "mask_mod", axes, "int32")
