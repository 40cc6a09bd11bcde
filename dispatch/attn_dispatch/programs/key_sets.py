"""Finds the union of ranges of keys that a mask_mod lets each query attend to.

Masks of few ranges: a window and the first keys, a prefix and the past, a block of an image. Their
ends are numbers of the query, so nothing of them depends on pairs.

A condition that an array at s equals a number of the query, as in a mask of documents, holds for a
range of keys as well, if the equal entries of the array are neighbours. That depends on what the
array holds, so whoever computes such a range must check it (`EqualKeys`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from attn_dispatch.programs.bounded_numbers import Compute, Number, extreme_of_given, may_overflow
from attn_dispatch.programs.inlining import inlined
from attn_dispatch.programs.key_values import (
    Borders,
    Position,
    Reading,
    compared,
    is_logical,
    none_or_all,
)
from attn_dispatch.programs.nodes import XlaArray
from attn_dispatch.programs.program import INDICES, ModProgram, dependence
from attn_dispatch.typed_jax import type_of

MAX_RANGES = 8
"""The most ranges of a set. A complement multiplies ranges, so a limit has to end that."""


@dataclass(frozen=True)
class EqualKeys:
    """The keys at which a value of s equals a value of the query.

    They are a range only if no other key is between them.
    """

    of_key: XlaArray
    """An integer by b and s."""
    of_query: XlaArray
    """An integer of the same dtype by b, n and t."""


@dataclass(frozen=True)
class KeyTerm:
    """The keys first <= s < end that are among all of `equal`; None where a side is open."""

    first: Number | None = None
    end: Number | None = None
    equal: tuple[EqualKeys, ...] = ()


KeySet = tuple[KeyTerm, ...]
"""The keys of any of these ranges, which may overlap; of none, no keys."""


@lru_cache(maxsize=1024)
def key_set(program: ModProgram) -> KeySet | None:
    """The ranges of a mask_mod; None if it is not known to be a union of few ranges."""
    return _Reading(program).result()


class _Reading(Reading[KeySet]):
    """Reads unions of ranges, in disjunctive normal form."""

    def __init__(self, program: ModProgram) -> None:
        super().__init__(program)
        self._program = program
        self._depends = dependence(program)

    def result(self) -> KeySet | None:
        return self._as_set(self._read())

    def _as_set(self, x: Var | Literal) -> KeySet | None:
        value = self._value(x)
        if isinstance(value, Number):
            return (KeyTerm(end=none_or_all(value)),)
        return None if isinstance(value, Position) else value

    def _between(self, borders: Borders) -> KeySet:
        return (KeyTerm(*borders),)

    def _condition(self, equation: JaxprEqn) -> KeySet | None:
        if not is_logical(equation):
            return None
        match equation.primitive.name:
            case "eq":
                return self._equal(*equation.invars)
            case "ne":
                return self._not_equal(*equation.invars)
            case "and" | "or" | "not" | "select_n":
                sets = [self._as_set(x) for x in equation.invars]
                found = [x for x in sets if x is not None]
                is_known = len(found) == len(sets)
                return _combined(equation.primitive.name, found) if is_known else None
            case _:
                return None

    def _not_equal(self, x: Var | Literal, y: Var | Literal) -> KeySet | None:
        # The keys with other values than one are no union of ranges, but those at other positions.
        values = self._value(x), self._value(y)
        if any(isinstance(z, Number) and may_overflow(z) for z in values):
            return None
        borders = compared("eq", *values)
        return None if borders is None else _opposite(self._between(borders))

    def _equal(self, x: Var | Literal, y: Var | Literal) -> KeySet | None:
        for key, query in ((x, y), (y, x)):
            number = self._value(query)
            if isinstance(key, Var) and isinstance(number, Number) and self._is_of_key(key):
                of_key = self._array(self._known(key, frozenset()).compute, self._depends[key])
                of_query = self._array(number.compute, number.depends)
                return (KeyTerm(equal=(EqualKeys(of_key, of_query),)),)
        return None

    def _is_of_key(self, x: Var) -> bool:
        """Whether a value is an integer that is the same for all heads and queries."""
        is_integer = np.issubdtype(type_of(x).dtype, np.integer) and not type_of(x).shape
        return is_integer and self._depends[x] <= {"b", "s"}

    def _array(self, compute: Compute, depends: frozenset[str]) -> XlaArray:
        return exact_array_of(compute, depends, self._program)


def exact_array_of(compute: Compute, depends: frozenset[str], program: ModProgram) -> XlaArray:
    """A value of a mask_mod as an array that XLA computes, in its own dtype."""
    types = [jax.ShapeDtypeStruct((), jnp.int32) for _ in INDICES]
    types += [jax.ShapeDtypeStruct(*array) for array in program.arrays]
    body = inlined(jax.make_jaxpr(compute)(*types))
    axes = "".join(x for x in INDICES if x in depends)
    return XlaArray(
        body, str(body.jaxpr), "mask_mod", axes, type_of(body.jaxpr.outvars[0]).dtype.name
    )


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
    return _limited(tuple(_intersection(a, b) for a in x for b in y))


def _either(x: KeySet, y: KeySet) -> KeySet | None:
    return _longer_ray(x, y) or _limited(x + y)


def _longer_ray(x: KeySet, y: KeySet) -> KeySet | None:
    """The union of two sets that are one range each, open on the same side; else None."""
    if len(x) != 1 or len(y) != 1 or x[0].equal or y[0].equal:
        return None
    (a,), (b,) = x, y
    if a.first is None and b.first is None and a.end is not None and b.end is not None:
        return (KeyTerm(end=extreme_of_given(jnp.maximum, a.end, b.end)),)
    if a.end is None and b.end is None and a.first is not None and b.first is not None:
        return (KeyTerm(first=extreme_of_given(jnp.minimum, a.first, b.first)),)
    return None


def _limited(x: KeySet) -> KeySet | None:
    return x if len(x) <= MAX_RANGES else None


def _intersection(x: KeyTerm, y: KeyTerm) -> KeyTerm:
    first = extreme_of_given(jnp.maximum, x.first, y.first)
    end = extreme_of_given(jnp.minimum, x.end, y.end)
    return KeyTerm(first, end, x.equal + y.equal)


def _opposite(x: KeySet) -> KeySet | None:
    """All other keys; None if a condition of equality would have to be negated."""
    found: KeySet | None = (KeyTerm(),)
    for term in x:
        if term.equal or found is None:
            return None
        before = () if term.first is None else (KeyTerm(end=term.first),)
        after = () if term.end is None else (KeyTerm(first=term.end),)
        found = _both(found, before + after)
    return found
