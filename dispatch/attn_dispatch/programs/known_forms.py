"""Recognizes a score_mod that a call's arguments can express: a soft cap, ALiBi, an added bias."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal as OneOf

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from attn_dispatch.programs.inlining import inlined
from attn_dispatch.programs.nodes import COMPARISONS, XlaArray
from attn_dispatch.programs.program import INDICES, ModProgram, dependence
from attn_dispatch.typed_jax import type_of

Distance = OneOf["|t - s|", "t - s", "s - t"]
_LEAST_CAP = 2.0**-100
_OPPOSITE: dict[Distance, Distance] = {"t - s": "s - t", "s - t": "t - s"}


@dataclass(frozen=True)
class AlibiSlopes:
    """score - slopes * |t - s|."""

    values: XlaArray
    """The slopes or their negatives, by batch row and head."""
    sign: int
    """-1 where `values` are the negated slopes."""
    is_one_sided: bool
    """Whether the distance is t - s rather than |t - s|: the same if no key comes after t."""


@dataclass(frozen=True)
class KnownForm:
    """A score_mod that adds something to the score, or to the score after a soft cap."""

    soft_cap: float | None
    adds: bool
    """Whether the score_mod adds anything, rather than only capping the score."""
    dtype: str | None = None
    """The dtype that the added numbers were converted from, if they were."""
    slopes: AlibiSlopes | None = None
    """The slopes, if what is added is ALiBi alone."""


class _Reading:
    """Looks up the operations that produce each value of a program."""

    def __init__(self, program: ModProgram) -> None:
        self.jaxpr, self._consts = program.body.jaxpr, program.body.consts
        self.depends = dependence(program)
        self._made_by = {out: x for x in self.jaxpr.eqns for out in x.outvars}

    def of_score(self, x: Var | Literal) -> bool:
        return isinstance(x, Var) and "score" in self.depends[x]

    def made_by(self, x: Var | Literal, *names: str) -> JaxprEqn | None:
        """The operation that produced a value, if it has one of these names."""
        equation = self._made_by.get(x) if isinstance(x, Var) else None
        return equation if equation and equation.primitive.name in names else None

    def narrow_dtype(self, sign: int, x: Var | Literal) -> str | None:
        """The dtype that an added number was converted from; None if not, or if x is subtracted."""
        made = self.made_by(x, "convert_element_type") if sign > 0 else None
        return None if made is None else _dtype(made.invars[0]).name

    def slopes(self, sign: int, x: Var | Literal) -> AlibiSlopes | None:
        """ALiBi's slopes, if x is slopes times a distance; `sign` is -1 where x is subtracted."""
        while (made := self.made_by(x, "convert_element_type")) and _is_float32(made):
            x = made.invars[0]  # of a weak type
        times = self.made_by(x, "mul")
        for slopes, distance in (times.invars, times.invars[::-1]) if times else ():
            which = self.distance(distance)
            if which and (isinstance(slopes, Literal) or self.depends[slopes] <= {"b", "n"}):
                sign = sign if which == "s - t" else -sign
                return AlibiSlopes(self._outside(slopes), sign, which != "|t - s|")
        return None

    def soft_cap(self, x: Var | Literal) -> float | None:
        """cap, if x is cap * tanh(score / cap)."""
        times = self._by_number(x, "mul")
        tanh = times and self.made_by(times[0], "tanh")
        inside = tanh and self._by_number(tanh.invars[0], "mul", "div")
        if not times or not inside or inside[0] != self.jaxpr.invars[0]:
            return None
        cap = times[1]
        if not _LEAST_CAP <= cap <= 1 / _LEAST_CAP:
            return None
        # In float32 both are the same number.
        return cap if np.float32(inside[1]) == np.float32(1 / cap) else None

    def distance(self, x: Var | Literal) -> Distance | None:
        """The difference of positions that a value is; None if it is none."""
        if made := self.made_by(x, "convert_element_type", "neg", "abs"):
            inner, name = self.distance(made.invars[0]), made.primitive.name
            if inner is None or name == "convert_element_type":
                return inner if _keeps_positions(made) else None
            return "|t - s|" if name == "abs" else _OPPOSITE.get(inner)
        if made := self.made_by(x, "sub"):
            match [self._position(y) for y in made.invars]:
                case ["t", "s"]:
                    return "t - s"
                case ["s", "t"]:
                    return "s - t"
                case _:
                    pass
        return None

    def _outside(self, x: Var | Literal) -> XlaArray:
        """A value that does not depend on the score, as an array that XLA computes."""
        alone = self.jaxpr.replace(invars=self.jaxpr.invars[1:], outvars=[x])
        body = inlined(ClosedJaxpr(alone, self._consts))
        axes = "".join(y for y in INDICES if isinstance(x, Var) and y in self.depends[x])
        return XlaArray(body, str(body.jaxpr), "score_mod", axes, "float32")

    def _position(self, x: Var | Literal) -> str | None:
        while (made := self.made_by(x, "convert_element_type")) and _keeps_positions(made):
            x = made.invars[0]
        t, s = self.jaxpr.invars[3:5]
        return "t" if x is t else "s" if x is s else None

    def _by_number(self, x: Var | Literal, *names: str) -> tuple[Var, float] | None:
        """The other factor and the number, if x is a product with a number or a quotient by one."""
        made = self.made_by(x, *names)
        if made is None:
            return None
        one, other = made.invars
        if isinstance(one, Literal) and made.primitive.name == "mul":
            one, other = other, one
        if isinstance(one, Literal) or not isinstance(other, Literal) or not other.val:
            return None
        number = float(other.val)
        return one, number if made.primitive.name == "mul" else 1 / number


def _is_float32(equation: JaxprEqn) -> bool:
    return {_dtype(equation.invars[0]), _dtype(equation.outvars[0])} == {np.dtype(np.float32)}


def _dtype(x: Var | Literal) -> np.dtype:
    return np.dtype(type_of(x).dtype)


def _keeps_positions(equation: JaxprEqn) -> bool:
    """Whether the operation converts to a dtype in which positions are exact."""
    dtype = _dtype(equation.outvars[0])
    is_exact = dtype.name in ("int32", "int64", "float32", "float64")
    return equation.primitive.name == "convert_element_type" and is_exact


@lru_cache(maxsize=1024)
def known_form(program: ModProgram) -> KnownForm | None:
    """The known form of a score_mod; None if it has none."""
    reading = _Reading(program)
    x, added = reading.jaxpr.outvars[0], list[tuple[int, Var | Literal]]()
    while made := reading.made_by(x, "add", "sub", "add_any"):
        one, other = made.invars
        sign = -1 if made.primitive.name == "sub" else 1
        if sign > 0 and reading.of_score(other):
            one, other = other, one
        if not reading.of_score(one) or reading.of_score(other):
            return None
        added.append((sign, other))
        x = one
    cap = None
    if x != reading.jaxpr.invars[0]:
        cap = reading.soft_cap(x)
        if cap is None:
            return None
    if len(added) != 1:
        return KnownForm(cap, bool(added))
    (one,) = added
    return KnownForm(cap, True, reading.narrow_dtype(*one), reading.slopes(*one))


@lru_cache(maxsize=1024)
def depends_on_distance_alone(program: ModProgram) -> bool:
    """Whether the result depends on t and s only through their difference."""
    reading = _Reading(program)
    takes_score = len(reading.jaxpr.invars) > len(INDICES) + len(program.arrays)
    t, s = reading.jaxpr.invars[2 + takes_score : 4 + takes_score]
    kinds: dict[Var, str] = {t: "t", s: "s"}
    for equation in reading.jaxpr.eqns:
        given = {kinds.get(x, "") for x in equation.invars if isinstance(x, Var)} - {""}
        name = equation.primitive.name
        if given == {"t", "s"} and name in ("sub", *COMPARISONS):
            kind = "distance"
        elif given <= {"distance"} or (len(given) == 1 and _keeps_positions(equation)):
            kind = "".join(given)
        else:
            kind = "both"
        kinds |= dict.fromkeys(equation.outvars, kind)
    out = reading.jaxpr.outvars[0]
    return isinstance(out, Var) and kinds.get(out) == "distance"


def is_sum_with_score(program: ModProgram) -> bool:
    """Whether the result is the score plus something that does not depend on it."""
    form = known_form(program)
    return form is not None and form.soft_cap is None
