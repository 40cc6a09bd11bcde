"""Finds the range of keys, first <= s < end, that a mask_mod lets each query attend to.

Most masks are such a range: a window, a prefix, chunks, lengths. A range costs a kernel at most two
comparisons, however the mask was written. Where first or end follow the diagonal it is a band, and
the kernel computes the band's tiles alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import inf

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from attn_dispatch.programs.bounded_numbers import Number, extreme_of_given
from attn_dispatch.programs.inlining import inlined
from attn_dispatch.programs.key_values import Borders, Reading, is_logical, none_or_all
from attn_dispatch.programs.nodes import XlaArray
from attn_dispatch.programs.program import INDICES, ModProgram


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
class _Hole:
    """All keys outside a range."""

    keys: KeyRange


@lru_cache(maxsize=1024)
def key_range(program: ModProgram) -> KeyRange:
    """The range of a mask_mod; if it has none, an open range with the whole mask as `rest`."""
    return _Reading(program).result()


class _Reading(Reading[KeyRange | _Hole]):
    """Reads one range of keys, or all keys outside one."""

    def result(self) -> KeyRange:
        return self._as_range(self._read())

    def _as_range(self, x: Var | Literal) -> KeyRange:
        value = self._value(x)
        if isinstance(value, Number):
            return KeyRange(end=none_or_all(value))
        if isinstance(value, KeyRange):
            return value
        assert isinstance(x, Var)
        return KeyRange(rest=(self._alone(x),))

    def _between(self, borders: Borders) -> KeyRange:
        return KeyRange(*borders)

    def _condition(self, equation: JaxprEqn) -> KeyRange | _Hole | None:
        if not is_logical(equation):
            return None
        match equation.primitive.name:
            case "and":
                return _both(*(self._as_range(x) for x in equation.invars))
            case "or":
                return _either(*(self._as_range(x) for x in equation.invars))
            case "not":
                value = self._value(equation.invars[0])
                return _opposite(value) if isinstance(value, KeyRange | _Hole) else None
            case _:
                return None


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


def xla_array_of(number: Number, mask_mod: ModProgram) -> XlaArray:
    """A number as an array that XLA computes, clipped to int32 beyond every position."""
    types = [jax.ShapeDtypeStruct((), jnp.int32) for _ in INDICES]
    types += [jax.ShapeDtypeStruct(*array) for array in mask_mod.arrays]

    body = inlined(jax.make_jaxpr(number.near)(*types))
    axes = "".join(x for x in "bnt" if x in number.depends)
    return XlaArray(body, str(body.jaxpr), "mask_mod", axes, "int32")
