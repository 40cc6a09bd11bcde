"""Whole numbers of a program that do not depend on s, with the bounds that are known of them.

s plus or minus such a number is a `Position`, whose comparison with a number holds for a range of
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

FAR = 2**30
"""Larger than every position; the sum of two such numbers fits int32."""
_SURELY_NEAR = 2**29
"""The sum of such a number and a position is not beyond FAR."""
_T = 2
"""The place of t among a program's inputs."""
UNBOUNDED = (-inf, inf)
"""The span of a number of which no bound is known."""

Compute = Callable[..., jax.Array]
"""A function of a program's inputs: b, n, t, s and the arrays."""


@dataclass(frozen=True)
class Number:
    """A whole number, or a bool, that does not depend on s: of_t * t and a rest within `span`."""

    compute: Compute
    depends: frozenset[str]
    """The indices among b, n and t that it depends on."""
    of_t: int = 0
    """The coefficient of t: -1, 0 or 1."""
    span: tuple[float, float] = UNBOUNDED
    """The bounds of the rest, the number without its multiple of t."""

    @property
    def rest(self) -> int | None:
        """The number without its multiple of t, if that is known and not far."""
        least, most = self.span
        return int(least) if least == most and abs(least) <= _SURELY_NEAR else None

    @property
    def offset(self) -> int | None:
        """The number minus t, if that is constant."""
        least, most = self.span
        return int(least) if self.of_t == 1 and least == most else None

    def near(self, *inputs: jax.Array) -> jax.Array:
        """The number as int32, clipped beyond every position. If its `rest` is known, t is all that
        is read, and may be an array of any shape."""
        if self.rest is None:
            x = jnp.asarray(self.compute(*inputs))
            if x.dtype == jnp.int32:  # one operation, which JAX traces faster than a function
                return lax.clamp(np.int32(-FAR), x, np.int32(FAR))
            return jnp.clip(x, -FAR, FAR).astype(jnp.int32)
        t, rest = inputs[_T], np.int32(self.rest)
        if self.of_t == 0:
            return jnp.asarray(rest)
        return t + rest if self.of_t > 0 else rest - t


def constant(x: ArrayLike) -> Number:
    """A number that every query and key has alike; bounded if it is a whole one."""
    number = np.asarray(x)
    is_whole = number.shape == () and number.dtype.kind in "iu"
    span = (int(number), int(number)) if is_whole else UNBOUNDED
    return Number(lambda *_: jnp.asarray(number), frozenset(), span=span)


Extreme = Callable[[jax.Array, jax.Array], jax.Array]
"""jnp.maximum or jnp.minimum."""


def extreme_of_given(function: Extreme, x: Number | None, y: Number | None) -> Number | None:
    """The maximum or minimum of the numbers that are not None."""
    return x or y if x is None or y is None else extreme(function, x, y)


def extreme(function: Extreme, x: Number, y: Number) -> Number:
    """The maximum or minimum of two numbers."""
    of_t = max(x.of_t, y.of_t)
    spans = [z.span if z.of_t == of_t else UNBOUNDED for z in (x, y)]
    choose = max if function is jnp.maximum else min
    # If one number is unbounded, the other still bounds the maximum or minimum.
    span = choose(a for a, _ in spans), choose(b for _, b in spans)
    return Number(
        lambda *inputs: function(x.near(*inputs), y.near(*inputs)),
        x.depends | y.depends,
        of_t,
        span,
    )


def plus(x: Number, y: Number) -> Number:
    """The sum; unbounded unless its multiple of t is -1, 0 or 1."""
    for one, other in ((x, y), (y, x)):
        if not other.of_t and other.span == (0, 0):
            return one
    of_t, span = x.of_t + y.of_t, (x.span[0] + y.span[0], x.span[1] + y.span[1])
    if abs(of_t) > 1:
        of_t, span = 0, UNBOUNDED
    return Number(
        lambda *inputs: x.near(*inputs) + y.near(*inputs),
        x.depends | y.depends,
        of_t,
        span,
    )


def minus(x: Number) -> Number:
    """The number with the opposite sign."""
    span = -x.span[1], -x.span[0]
    return Number(lambda *inputs: -x.near(*inputs), x.depends, -x.of_t, span)


def may_overflow(x: Number) -> bool:
    """Whether a known bound is so large that a sum may wrap around."""
    return any(FAR < abs(bound) < inf for bound in x.span)


def is_nonnegative(x: Number) -> bool:
    """Whether the number is known not to be negative; t is not."""
    return x.of_t >= 0 and x.span[0] >= 0


@dataclass(frozen=True)
class Position:
    """sign * s + more, or its absolute value."""

    sign: int
    more: Number
    is_absolute: bool = False


class Borders(NamedTuple):
    """The keys first <= s < end; None where that side is open."""

    first: Number | None = None
    end: Number | None = None


def moved(name: str, given: Sequence[object]) -> Position | None:
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
    """The keys for which the comparison of a position with a number holds; None if it is none."""
    if name not in _MIRRORED:
        return None
    if isinstance(x, Number):
        return compared(_MIRRORED[name], y, x)
    if not (isinstance(x, Position) and isinstance(y, Number)):
        return None
    if x.is_absolute:
        if name not in ("lt", "le"):
            return None
        x = replace(x, is_absolute=False)
        both = (compared(name, x, y), compared(_MIRRORED[name], x, minus(y)))
        below, above = (z or Borders() for z in both)
        return Borders(below.first or above.first, below.end or above.end)
    if x.sign < 0:
        return compared(_MIRRORED[name], Position(1, minus(x.more)), minus(y))
    border = plus(y, minus(x.more))
    after = plus(border, constant(1))
    return {
        "lt": Borders(end=border),
        "le": Borders(end=after),
        "gt": Borders(after),
        "ge": Borders(border),
        "eq": Borders(border, after),
    }[name]
