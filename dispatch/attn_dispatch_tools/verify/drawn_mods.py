"""score_mods of drawn cases, computed by JAX and by NumPy, and formulas of mask_mods.

A score_mod is a list of steps. v0 is the score. Each step computes a further value from earlier
ones, x and y, from the positions, and from an array that it reads, r. The result is v0 plus half of
the last value, or the one step if that is in `ALONE`. Steps keep moderate values moderate. Their
derivatives are written out here, for the reference; implementations use JAX's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.programs.program import ModProgram
from attn_dispatch.programs.tracing import trace

Value: TypeAlias = jax.Array
"""Scores or indices of pairs. In the reference they are NumPy's arrays, for which the formulas are
the same."""
Numbers: TypeAlias = Value | np.ndarray
Slope: TypeAlias = Value | float


class Functions(Protocol):
    """The functions that formulas use, of NumPy or of JAX."""

    def tanh(self, x: Value, /) -> Value: ...
    def sin(self, x: Value, /) -> Value: ...
    def cos(self, x: Value, /) -> Value: ...
    def square(self, x: Value, /) -> Value: ...
    def exp(self, x: Value, /) -> Value: ...
    def log1p(self, x: Value, /) -> Value: ...
    def log(self, x: Value, /) -> Value: ...
    def where(self, condition: Value, x: Slope, y: Slope, /) -> Value: ...
    def maximum(self, x: Value, y: Slope, /) -> Value: ...
    def sigmoid(self, x: Value, /) -> Value: ...


class Step(NamedTuple):
    """One operation of a score_mod."""

    formula: str
    """A key of `FORMULAS` or `ALONE`."""
    x: int
    """The number of the value x."""
    y: int
    c: float
    w: int
    read: str
    """The index of the array that it reads: b, n, t or s."""


class _Given(NamedTuple):
    x: Value
    y: Value
    c: float
    w: int
    r: Value
    t: Value
    s: Value


@dataclass(frozen=True)
class _Formula:
    value: Callable[[Functions, _Given], Value]
    """The value, from a library of functions (NumPy's or another) and the step's inputs."""
    slopes: Callable[[Functions, _Given], tuple[Slope, Slope, Slope]]
    """The derivatives by x, y and r."""
    reads: bool = False
    """Whether the formula reads an array, as r."""


FORMULAS: dict[str, _Formula] = {
    "c tanh(x / c)": _Formula(
        lambda f, g: g.c * f.tanh(g.x / g.c), lambda f, g: (1 - f.tanh(g.x / g.c) ** 2, 0, 0)
    ),
    "x + c": _Formula(lambda f, g: g.x + g.c, lambda f, g: (1, 0, 0)),
    "c - x": _Formula(lambda f, g: g.c - g.x, lambda f, g: (-1, 0, 0)),
    "(x + y) / 2": _Formula(lambda f, g: (g.x + g.y) / 2, lambda f, g: (0.5, 0.5, 0)),
    "x - tanh(y)": _Formula(
        lambda f, g: g.x - f.tanh(g.y), lambda f, g: (1, f.tanh(g.y) ** 2 - 1, 0)
    ),
    "sin(x) y": _Formula(
        lambda f, g: f.sin(g.x) * g.y, lambda f, g: (f.cos(g.x) * g.y, f.sin(g.x), 0)
    ),
    "x / (1 + y²)": _Formula(
        lambda f, g: g.x / (1 + g.y * g.y),
        lambda f, g: (1 / (1 + g.y**2), -2 * g.x * g.y / (1 + g.y**2) ** 2, 0),
    ),
    "c / (1 + x²)": _Formula(
        lambda f, g: g.c / (1 + f.square(g.x)),
        lambda f, g: (-2 * g.c * g.x / (1 + g.x**2) ** 2, 0, 0),
    ),
    "sigmoid(x)": _Formula(
        lambda f, g: f.sigmoid(g.x), lambda f, g: (f.sigmoid(g.x) * (1 - f.sigmoid(g.x)), 0, 0)
    ),
    "exp(-x²)": _Formula(
        lambda f, g: f.exp(-(g.x**2)), lambda f, g: (-2 * g.x * f.exp(-(g.x**2)), 0, 0)
    ),
    "log(1 + x²)": _Formula(
        lambda f, g: f.log1p(g.x * g.x), lambda f, g: (2 * g.x / (1 + g.x**2), 0, 0)
    ),
    "x - |t - s| / w": _Formula(lambda f, g: g.x - abs(g.t - g.s) / g.w, lambda f, g: (1, 0, 0)),
    "x r": _Formula(lambda f, g: g.x * g.r, lambda f, g: (g.r, 0, g.x), reads=True),
    "x + r tanh((t - s) / 16)": _Formula(
        lambda f, g: g.x + g.r * f.tanh((g.t - g.s) / 16),
        lambda f, g: (1, 0, f.tanh((g.t - g.s) / 16)),
        reads=True,
    ),
    "r tanh((t - s) / 16)": _Formula(
        lambda f, g: g.r * f.tanh((g.t - g.s) / 16),
        lambda f, g: (0, 0, f.tanh((g.t - g.s) / 16)),
        reads=True,
    ),
    "x if t - s < w else y": _Formula(
        lambda f, g: f.where(g.t - g.s < g.w, g.x, g.y),
        lambda f, g: (g.t - g.s < g.w, g.t - g.s >= g.w, 0),
    ),
    "x if s >= w or s == t else c": _Formula(
        lambda f, g: f.where((g.s >= g.w) | (g.s == g.t), g.x, g.c),
        lambda f, g: ((g.s >= g.w) | (g.s == g.t), 0, 0),
    ),
    "x - log(1 + t - s) if s <= t else x": _Formula(
        lambda f, g: g.x - f.where(g.s <= g.t, f.log(1.0 + f.maximum(g.t - g.s, 0)), 0.0),
        lambda f, g: (1, 0, 0),
    ),
    "x - log(1 + t - s)": _Formula(
        lambda f, g: g.x - f.log(1.0 + (g.t - g.s)), lambda f, g: (1, 0, 0)
    ),
}
OF_THE_PAST = {"x - log(1 + t - s)"}
"""Formulas that are NaN for keys after the query's position."""

ALONE: dict[str, _Formula] = {
    "soft cap": FORMULAS["c tanh(x / c)"],
    "ALiBi": _Formula(
        lambda f, g: g.x - g.r / g.w * abs(g.t - g.s),
        lambda f, g: (1, 0, -abs(g.t - g.s) / g.w),
        reads=True,
    ),
}
"""score_mods of one step, for which calls have an argument."""
_ALL = FORMULAS | ALONE

MASKS: dict[str, Callable[[Value, Value, Value, Value, int], Value]] = {
    "s <= t or s < x[b]": lambda n, t, s, x, w: (s <= t) | (s < x),
    "s < x[b] and t - s < w": lambda n, t, s, x, w: (s < x) & (t - s < w),
    "s < t and s < x[b]": lambda n, t, s, x, w: (s < t) & (s < x),
    "not (t - s > w or s > x[b])": lambda n, t, s, x, w: ~((t - s > w) | (s > x)),
    "s == t or (t - s) % w == 0": lambda n, t, s, x, w: (s == t) | ((t - s) % w == 0),
    "s == 0 or |t - s| <= w + n": lambda n, t, s, x, w: (s == 0) | (abs(t - s) <= w + n),
}
"""Masks by n, t, s, an entry of an int32 array [batch rows or sequences], and a number."""


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-abs(x)))


_NUMPY = {name: getattr(np, name) for name in
          ("tanh", "sin", "cos", "square", "exp", "log1p", "log", "where", "maximum")}  # fmt: skip
EXACT = cast("Functions", SimpleNamespace(**_NUMPY, sigmoid=_sigmoid))
FAST = cast(
    "Functions",
    SimpleNamespace(
        **_NUMPY | {"tanh": lambda x: _rounded(np.tanh(x))},
        sigmoid=lambda x: _rounded(_sigmoid(x)),
    ),
)
"""Functions with the error of the hardware's tanh, 2^-11 (PTX ISA, tanh.approx.f32)."""
_JAX = cast(
    "Functions",
    SimpleNamespace(**{name: getattr(jnp, name) for name in _NUMPY}, sigmoid=jax.nn.sigmoid),
)


def _rounded(x: np.ndarray) -> np.ndarray:
    """x rounded to the eleven bits of float16, in whose range it is."""
    return np.asarray(x).astype(np.float16).astype(np.asarray(x).dtype)


@dataclass(frozen=True)
class Places:
    """The indices of pairs of queries and keys, arrays that broadcast to [..., N, T, S]."""

    copy: np.ndarray
    """The row of the arrays that a mod reads."""
    b: np.ndarray
    n: np.ndarray
    t: np.ndarray
    s: np.ndarray

    @staticmethod
    def together(rows: list[Places]) -> Places:
        """The places of batch rows [N, T, S], stacked to [B, N, T, S]."""

        def stacked(name: str) -> np.ndarray:
            every = [np.asarray(getattr(x, name)) for x in rows]
            return np.stack([x.reshape((1,) * (3 - x.ndim) + x.shape) for x in every])

        return Places(*(stacked(x.name) for x in fields(Places)))

    def at(self, index: str, array: np.ndarray) -> np.ndarray:
        """An array [copies, length] read by an index, for each pair."""
        return array[self._copy_in(array), getattr(self, index)]

    def summed(self, index: str, amount: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The sum of `amount` over all pairs that read each entry of such an array."""
        total = np.zeros(shape, amount.dtype)
        where = np.broadcast_arrays(self._copy_in(total), getattr(self, index), amount)
        np.add.at(total, tuple(where[:2]), where[2])
        return total

    def _copy_in(self, array: np.ndarray) -> np.ndarray:
        return self.copy if array.shape[0] > 1 else np.zeros_like(self.copy)


@dataclass(frozen=True)
class DrawnScoreMod(ModProgram):
    """A score_mod's program and its steps."""

    steps: tuple[Step, ...] = field(compare=False, default=())
    reads: str = field(compare=False, default="")
    """The index by which each of its arrays is read."""

    def modified(
        self,
        score: np.ndarray,
        may_attend: np.ndarray,
        places: Places,
        arrays: list[np.ndarray],
        functions: Functions = EXACT,
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """The new scores [..., N, T, S], and their derivatives by the old scores and by the arrays;
        all are 0 where a pair may not attend."""
        with np.errstate(invalid="ignore", divide="ignore"):
            results = self._modified(score, places, arrays, functions)
        score, slope, by_read = results
        by_read = {x: np.where(may_attend, y, 0) for x, y in by_read.items()}
        return np.where(may_attend, score, 0), np.where(may_attend, slope, 0), by_read

    def _modified(
        self, score: np.ndarray, places: Places, arrays: list[np.ndarray], functions: Functions
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        values, given = [score], []
        read = {x: places.at(x, array) for x, array in zip(self.reads, arrays, strict=True)}
        for step in self.steps:
            one = _given(step, values, places.t, places.s, read)
            values.append(np.asarray(_ALL[step.formula].value(functions, one), score.dtype))
            given.append(one)
        score_share, last_share = _shares(self.steps)
        slopes: list[Slope] = [score_share, *(0.0 for _ in self.steps)]
        slopes[-1] = slopes[-1] + last_share
        by_read: dict[str, Slope] = dict.fromkeys(self.reads, 0.0)
        for i in reversed(range(len(self.steps))):
            step, slope = self.steps[i], slopes[i + 1]
            x_slope, y_slope, read_slope = _ALL[step.formula].slopes(functions, given[i])
            slopes[step.x] = slopes[step.x] + slope * x_slope
            slopes[step.y] = slopes[step.y] + slope * y_slope
            if _ALL[step.formula].reads:
                by_read[step.read] = by_read[step.read] + slope * read_slope

        def like_score(x: Slope) -> np.ndarray:
            return np.broadcast_to(np.asarray(x, score.dtype), score.shape)

        shares = {x: like_score(y) for x, y in by_read.items()}
        return score_share * score + last_share * values[-1], like_score(slopes[0]), shares


def is_alone(steps: tuple[Step, ...]) -> bool:
    """Whether the one step is the whole score_mod."""
    return steps[0].formula in ALONE


def _shares(steps: tuple[Step, ...]) -> tuple[float, float]:
    """The factors of the score and of the last value in the result."""
    return (0.0, 1.0) if is_alone(steps) else (1.0, 0.5)


def reads_of(steps: tuple[Step, ...]) -> str:
    """The indices by which steps read arrays, in order."""
    found = {step.read for step in steps if _ALL[step.formula].reads}
    return "".join(x for x in "bnts" if x in found)


@lru_cache(maxsize=1024)
def score_mod(steps: tuple[Step, ...], lengths: tuple[int, ...], dtype: str) -> DrawnScoreMod:
    """The program of these steps.

    Args:
      steps: at least one.
      lengths: the lengths of the arrays that they read.
      dtype: the dtype of the score.
    """
    reads = reads_of(steps)

    def function(score: Value, b: Value, n: Value, t: Value, s: Value, *arrays: Value) -> Value:
        at = {"b": b, "n": n, "t": t, "s": s}
        read = {x: array[at[x]] for x, array in zip(reads, arrays, strict=True)}
        values = [score]
        for step in steps:
            value = _ALL[step.formula].value(_JAX, _given(step, values, t, s, read))
            values.append(value.astype(score.dtype))
        return values[-1] if is_alone(steps) else score + values[-1] / 2

    arrays = [np.zeros(length, np.float32) for length in lengths]
    made = trace("score_mod", function, arrays, dtype).program
    return DrawnScoreMod(made.text, made.arrays, made.jaxpr, made.body, steps, reads)


def _given(
    step: Step, values: Sequence[Numbers], t: Numbers, s: Numbers, read: Mapping[str, Numbers]
) -> _Given:
    """A step's inputs; r is None for a formula that reads no array."""

    def value(x: Numbers | None) -> Value:
        return cast("Value", x)

    x, y, r = values[step.x], values[step.y], read.get(step.read)
    return _Given(value(x), value(y), step.c, step.w, value(r), value(t), value(s))
