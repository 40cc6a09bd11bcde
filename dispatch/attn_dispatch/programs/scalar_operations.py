"""The operations of a jaxpr on scalars, as lines of straight-line code.

What is known of integers makes lines superfluous: n is never negative, so `slopes[n]` has no code
for negative places, and no number of heads in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import numpy as np
from jax.lax import RoundingMethod

from attn_dispatch.programs.nodes import COMPARISONS, Unsupported
from attn_dispatch.programs.scalar_code import (
    ANY,
    INDICES,
    Code,
    Register,
    Scalar,
    Span,
    fitting,
    kind_of,
    of_score,
    span_of,
)

Given = Sequence[Scalar]

_FLOATS = {
    "tanh", "exp", "exp2", "log1p", "expm1", "sin", "cos", "erf", "sqrt", "rsqrt", "ceil",
    "floor",
}  # fmt: skip
_ARITHMETIC = {"add", "add_any", "sub", "mul", "max", "min"}
_NORMAL = 2.0**126


def of(
    name: str, code: Code, kind: str, given: Given, params: Mapping[str, object]
) -> Scalar | None:
    """The result of an operation, some of whose operands are not constants; None if unknown."""
    if name in COMPARISONS:
        return _compared(name, code, given)
    if name in _OF_ANY_KIND:
        return _OF_ANY_KIND[name](code, kind, given)
    if name == "integer_pow":
        return _power(code, kind, given[0], params["y"])  # pyright: ignore[reportArgumentType]
    if kind == "p":
        return None
    if name in _ARITHMETIC:
        return _arithmetic(name.removesuffix("_any"), code, kind, given)
    if kind == "i":
        return _of_integers(name, code, given)
    return _of_floats(name, code, given, params)


def select(code: Code, kind: str, condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
    """`yes` where the condition holds, else `no`."""
    if isinstance(condition, bool):
        return yes if condition else no
    if yes == no:
        return yes
    if kind == "p":
        both = [
            _logical("and", code, "p", [condition, yes]),
            _logical("and", code, "p", [_logical("not", code, "p", [condition]), no]),
        ]
        return _logical("or", code, "p", both)
    (low, high), (low_no, high_no) = (span_of(x) if kind == "i" else ANY for x in (yes, no))
    span = min(low, low_no), max(high, high_no)
    return code.add(kind, "select", condition, yes, no, span=span)


def _compared(name: str, code: Code, given: Given) -> Scalar:
    x, y = given
    if kind_of(x) == "p" and name in ("eq", "ne"):
        differ = _logical("xor", code, "p", given)
        return differ if name == "ne" else _logical("not", code, "p", [differ])
    if kind_of(x) == "p":
        raise Unsupported("booleans", f"{name} of booleans")
    if kind_of(x) == "i" and (known := _known_comparison(name, span_of(x), span_of(y))) is not None:
        return known
    return code.add("p", name, x, y)


def _known_comparison(name: str, x: Span, y: Span) -> bool | None:
    """The result, if it is the same for all numbers of these spans."""
    match name:
        case "lt":
            return True if x[1] < y[0] else False if x[0] >= y[1] else None
        case "le":
            return _known_comparison("ge", y, x)
        case "gt":
            return _known_comparison("lt", y, x)
        case "ge":
            less = _known_comparison("lt", x, y)
            return None if less is None else not less
        case _:
            apart = x[1] < y[0] or y[1] < x[0]
            return name == "ne" if apart else None


def _logical(name: str, code: Code, kind: str, given: Given) -> Scalar:
    if kind == "i":
        return code.add("i", f"{name}_bits", *given)
    if name == "not":
        return not given[0] if isinstance(given[0], bool) else code.add("p", "not_", given[0])
    x, y = given
    for one, other in ((x, y), (y, x)):
        if isinstance(one, bool):
            if name == "xor":
                return _logical("not", code, "p", [other]) if one else other
            return other if one == (name == "and") else one
    return code.add("p", {"and": "and_", "or": "or_", "xor": "xor_"}[name], x, y)


def _selected(code: Code, kind: str, given: Given) -> Scalar:
    condition, *cases = given
    if kind_of(condition) != "p" or len(cases) != 2:
        raise Unsupported("select_by_number", "select_n by a number")
    return select(code, kind, condition, cases[1], cases[0])


def _clamped(code: Code, kind: str, given: Given) -> Scalar:
    low, x, high = given
    return _arithmetic("min", code, kind, [_arithmetic("max", code, kind, [x, low]), high])


def _is_finite(code: Code, kind: str, given: Given) -> Scalar:
    return code.add("p", "lt", code.add("f", "abs_", given[0]), float("inf"))


def _converted(code: Code, kind: str, x: Scalar) -> Scalar:
    before = kind_of(x)
    if before == kind:
        return x
    if before == "p":
        one, zero = (1.0, 0.0) if kind == "f" else (1, 0)
        return select(code, kind, x, one, zero)
    if kind == "p":
        return _compared("ne", code, [x, 0.0 if before == "f" else 0])
    return code.add("i", "to_int", x) if kind == "i" else _as_float(code, x)


def _as_float(code: Code, x: Scalar) -> Scalar:
    """An integer as a float. Of a difference of positions, the difference as floats, which is the
    same: a position is then converted once for a row, or a column, of scores."""
    match code.made_by(x):
        case ("abs_int", (inner,)):
            return code.add("f", "abs_", _as_float(code, inner))
        case ("sub", (one, other)) if one in INDICES and other in INDICES:
            return code.add("f", "sub", _as_float(code, one), _as_float(code, other))
        case _:
            return code.add("f", "to_float", x)


def _arithmetic(name: str, code: Code, kind: str, given: Given) -> Scalar:
    x, y = given
    if kind == "f":
        return code.add("f", name, x, y)
    ends = [_WHOLE[name](a, b) for a, b in product(span_of(x), span_of(y))]
    span = fitting(min(ends), max(ends))
    if name in ("max", "min") and span in (span_of(x), span_of(y)):
        # One of both, whatever they are, if their spans do not overlap.
        one, other = (x, y) if span == span_of(x) else (y, x)
        apart = span_of(other)[1] <= span[0] if name == "max" else span_of(other)[0] >= span[1]
        if apart:
            return one
    return code.add("i", name, x, y, span=span)


_WHOLE: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": max,
    "min": min,
}


def _of_integers(name: str, code: Code, given: Given) -> Scalar | None:
    x = given[0]
    low, high = span_of(x)
    if name == "neg":
        return code.add("i", "neg", x, span=fitting(-high, -low))
    if name == "abs":
        return x if low >= 0 else code.add("i", "abs_int", x, span=_abs_span(low, high))
    if name == "sign":
        return code.add("i", "sign_int", x, span=(max(min(low, 1), -1), min(max(high, -1), 1)))
    if name in ("div", "rem"):
        operation = "quotient" if name == "div" else "remainder"
        return code.add("i", operation, *given, span=_division_span(name, low, high, given[1]))
    return None


def _abs_span(low: int, high: int) -> Span:
    most = max(-low, high)
    return (max(low, -high, 0), most) if most < -ANY[0] else ANY


def _division_span(name: str, low: int, high: int, divisor: Scalar) -> Span:
    """The span of a number that is not negative, divided by a constant above 0."""
    if isinstance(divisor, Register) or divisor <= 0 or low < 0:
        return ANY
    if name == "div":
        return int(low // divisor), int(high // divisor)
    return 0, int(min(high, divisor - 1))


def _of_floats(name: str, code: Code, given: Given, params: Mapping[str, object]) -> Scalar | None:
    x = given[0]
    if name == "div":
        return _divided(code, x, given[1])
    if name in _FLOATS:
        return code.add("f", name, x)
    if name in _COMPOSED:
        return _COMPOSED[name](code, x)
    if name == "pow":
        exponent = _converted(code, "f", given[1])
        return code.add("f", "pow_", x, exponent)
    if name in ("neg", "abs"):
        return code.add("f", name if name == "neg" else "abs_", x)
    if name == "sign":
        below = select(code, "f", code.add("p", "lt", x, 0.0), -1.0, x)
        return select(code, "f", code.add("p", "gt", x, 0.0), 1.0, below)
    if name == "round":
        to_even = params["rounding_method"] == RoundingMethod.TO_NEAREST_EVEN
        return code.add("f", "round_even", x) if to_even else None
    return None


def _log(code: Code, x: Scalar) -> Scalar:
    # Rounded down, as for T5's buckets, a fast logarithm might become another number.
    return code.add("f", "log" if of_score(x) else "exact_log", x)


def _log2(code: Code, x: Scalar) -> Scalar:
    return _divided(code, _log(code, x), float(np.log(np.float32(2))))


def _one_minus_square(code: Code, x: Scalar) -> Scalar:
    return code.add("f", "mul", code.add("f", "sub", 1.0, x), code.add("f", "add", 1.0, x))


def _logistic(code: Code, x: Scalar) -> Scalar:
    beside = code.add("f", "add", code.add("f", "exp", code.add("f", "neg", x)), 1.0)
    return code.add("f", "div", 1.0, beside)


_COMPOSED: dict[str, Callable[[Code, Scalar], Scalar]] = {
    "log": _log,
    "log2": _log2,
    "logistic": _logistic,
    "one_minus_square": _one_minus_square,
    "square": lambda code, x: code.add("f", "mul", x, x),
}
"""Functions of one float that are several operations, or not always the same. JAX has log2, and
1 - x² in the derivative of tanh, as operations from 0.12 on."""


def _divided(code: Code, x: Scalar, y: Scalar) -> Scalar:
    """A quotient. A score is multiplied by the reciprocal of a constant, in a fraction of the time;
    a number of positions is not: rounded down, it might become another one."""
    if of_score(x) and not isinstance(y, Register) and 1 / _NORMAL < abs(y) < _NORMAL:
        return code.add("f", "mul", x, float(np.float32(1) / np.float32(y)))
    return code.add("f", "div", x, y)


def _power(code: Code, kind: str, x: Scalar, exponent: int) -> Scalar | None:
    if abs(exponent) > 16 or (kind == "i" and exponent < 0):
        return None
    if exponent == 0:
        return 1.0 if kind == "f" else 1
    result = x
    for _ in range(abs(exponent) - 1):
        result = code.add(kind, "mul", result, x)
    return code.add("f", "div", 1.0, result) if exponent < 0 else result


_OF_ANY_KIND: dict[str, Callable[[Code, str, Given], Scalar]] = {
    **{x: partial(_logical, x) for x in ("and", "or", "xor", "not")},
    "select_n": _selected,
    "clamp": _clamped,
    "is_finite": _is_finite,
    "convert_element_type": lambda code, kind, given: _converted(code, kind, given[0]),
}
"""Operations of floats, integers and predicates, by the kind of the result."""
