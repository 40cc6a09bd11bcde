"""Finds the keys that a mask_mod lets each query attend to: one range first <= s < end, or several.

Most masks are one range: a window, a prefix, chunks, lengths. A range costs a kernel at most two
comparisons, however the mask was written. Where first or end follow the diagonal it is a band, and
the kernel computes the band's tiles alone. Conditions that are no range are left beside it.

Other masks are the union of few ranges: a window and the first keys, a prefix and the past, a block
of an image. Their ends are numbers of the query, so nothing of them depends on pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from attn_dispatch.programs.bounded_numbers import (
    FAR,
    Borders,
    Number,
    Position,
    compared,
    constant,
    extreme,
    extreme_of_given,
    is_nonnegative,
    may_overflow,
    minus,
    moved,
    plus,
)
from attn_dispatch.programs.inlining import inlined, needed
from attn_dispatch.programs.nodes import COMPARISONS, XlaArray
from attn_dispatch.programs.program import INDICES, ModProgram
from attn_dispatch.typed_jax import evaluated, type_of

MAX_RANGES = 8
"""The most ranges of a set. A complement multiplies ranges, so a limit has to end that."""

KeySet = tuple[Borders, ...]
"""The keys of any of these ranges, which may overlap; of none, no keys."""


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


def key_range(program: ModProgram) -> KeyRange:
    """The range of a mask_mod; if it has none, an open range with the whole mask as `rest`."""
    return _keys(program)[0]


def key_set(program: ModProgram) -> KeySet | None:
    """The ranges of a mask_mod; None if it is not known to be a union of few ranges."""
    return _keys(program)[1]


@lru_cache(maxsize=1024)
def _keys(program: ModProgram) -> tuple[KeyRange, KeySet | None]:
    return _Reading(program).result()


class _Reading:
    """Classifies every value of a program by its dependence on s, in one pass.

    A value that does not depend on s is a `Number`. A condition is the union of ranges for which it
    holds. A value is None if it depends on s in any way that the reading does not know.
    """

    def __init__(self, program: ModProgram) -> None:
        self._body = program.body
        inputs = program.body.jaxpr.invars
        self._values: dict[Var, Number | Position | KeySet | None] = {}
        self._conjunctions: dict[Var, KeyRange] = {}
        self._values |= {x: self._known(x, frozenset()) for x in inputs}
        for var, name in zip(inputs, INDICES, strict=False):
            self._values[var] = self._known(var, frozenset(name))
        t, s = inputs[2:4]
        self._values[t] = Number(_position, frozenset("t"), 1, (0, 0))
        self._values[s] = Position(1, constant(0))

    def result(self) -> tuple[KeyRange, KeySet | None]:
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
        mask = self._body.jaxpr.outvars[0]
        return self._range(mask), self._set(mask)

    def _value(self, x: Var | Literal) -> Number | Position | KeySet | None:
        return constant(x.val) if isinstance(x, Literal) else self._values[x]

    def _known(self, var: Var, depends: frozenset[str]) -> Number:
        one = self._alone(var)
        return Number(lambda *inputs: evaluated(one, *inputs)[0], depends)

    def _alone(self, var: Var) -> ClosedJaxpr:
        alone = self._body.jaxpr.replace(outvars=[var])
        return ClosedJaxpr(alone.replace(eqns=needed(alone)), self._body.consts)

    def _dependent_on_s(
        self, equation: JaxprEqn, given: Sequence[Number | Position | KeySet | None]
    ) -> Position | KeySet | None:
        name = equation.primitive.name
        if name in ("convert_element_type", "copy") and isinstance(given[0], Position):
            return given[0] if _holds_positions(equation) else None
        if name in ("and", "or", "not", "select_n"):
            return self._logical(name, equation)
        if any(isinstance(x, Number) and may_overflow(x) for x in given):
            return None
        if name in ("add", "sub", "neg", "abs"):
            return moved(name, given)
        if name in COMPARISONS:
            borders = compared("eq" if name == "ne" else name, *given)
            if borders is None:
                return None
            return _opposite((borders,)) if name == "ne" else (borders,)
        return None

    def _logical(self, name: str, equation: JaxprEqn) -> KeySet | None:
        out, given = equation.outvars[0], equation.invars
        if type_of(out).dtype != np.bool_:
            return None
        if name == "and":
            x, y = given
            self._conjunctions[out] = _both_ranges(self._range(x), self._range(y))
        sets = [self._set(x) for x in given]
        known = [x for x in sets if x is not None]
        return _combined(name, known) if len(known) == len(sets) else None

    def _set(self, x: Var | Literal) -> KeySet | None:
        value = self._value(x)
        if isinstance(value, Number):
            return (Borders(end=_none_or_all(value)),)
        return None if isinstance(value, Position) else value

    def _range(self, x: Var | Literal) -> KeyRange:
        """The range of a condition, with what is no range of it as `rest`."""
        if isinstance(x, Var) and x in self._conjunctions:
            return self._conjunctions[x]
        keys = self._set(x)
        if keys is not None and len(keys) == 1:
            return KeyRange(*keys[0])
        assert isinstance(x, Var)
        return KeyRange(rest=(self._alone(x),))


def _position(b: jax.Array, n: jax.Array, t: jax.Array, *_: jax.Array) -> jax.Array:
    return t


def _none_or_all(holds: Number) -> Number:
    """The number of keys that attend, for a bool that does not depend on s."""
    return Number(lambda *inputs: jnp.where(holds.compute(*inputs), FAR, 0), holds.depends)


def _both_ranges(x: KeyRange, y: KeyRange) -> KeyRange:
    ends = tuple(z for one in (x, y) for z in one.ends or (one.end,) if z is not None)
    borders = _both_borders(Borders(x.first, x.end), Borders(y.first, y.end))
    return KeyRange(*borders, ends, x.rest + y.rest)


def _both_borders(x: Borders, y: Borders) -> Borders:
    first = extreme_of_given(jnp.maximum, x.first, y.first)
    return Borders(first, extreme_of_given(jnp.minimum, x.end, y.end))


def _combined(operation: str, sets: Sequence[KeySet]) -> KeySet | None:
    match operation, sets:
        case "and", (x, y):
            return _both(x, y)
        case "or", (x, y):
            return _either(x, y)
        case "not", (x,):
            return _opposite(x)
        case "select_n", (condition, no, yes):
            opposite = _opposite(condition)
            if opposite is None:
                return None
            parts = _both(opposite, no), _both(condition, yes)
            return None if None in parts else _either(*(x for x in parts if x is not None))
        case _:
            return None


def _both(x: KeySet, y: KeySet) -> KeySet | None:
    return _limited(tuple(_both_borders(a, b) for a in x for b in y))


def _either(x: KeySet, y: KeySet) -> KeySet | None:
    return _longer_ray(x, y) or _limited(x + y)


def _longer_ray(x: KeySet, y: KeySet) -> KeySet | None:
    """The union of two sets that are one range each, open on the same side; else None."""
    if len(x) != 1 or len(y) != 1:
        return None
    (a,), (b,) = x, y
    if a.first is None and b.first is None and a.end and b.end:
        return (Borders(end=extreme_of_given(jnp.maximum, a.end, b.end)),)
    if a.end is None and b.end is None and a.first and b.first:
        return (Borders(first=extreme_of_given(jnp.minimum, a.first, b.first)),)
    return None


def _limited(x: KeySet) -> KeySet | None:
    return x if len(x) <= MAX_RANGES else None


def _opposite(x: KeySet) -> KeySet | None:
    """All other keys."""
    others: KeySet | None = (Borders(),)
    for first, end in x:
        before = () if first is None else (Borders(end=first),)
        after = () if end is None else (Borders(end),)
        others = None if others is None else _both(others, before + after)
    return others


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


def xla_array_of(number: Number, mask_mod: ModProgram) -> XlaArray:
    """A number as an array that XLA computes, clipped to int32 beyond every position."""
    types = [jax.ShapeDtypeStruct((), jnp.int32) for _ in INDICES]
    types += [jax.ShapeDtypeStruct(*array) for array in mask_mod.arrays]

    body = inlined(jax.make_jaxpr(number.near)(*types))
    axes = "".join(x for x in "bnt" if x in number.depends)
    return XlaArray(body, str(body.jaxpr), "mask_mod", axes, "int32")
