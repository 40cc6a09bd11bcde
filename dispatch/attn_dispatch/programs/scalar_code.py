"""Straight-line code of a program for one pair: text that Python and C can both run.

    f0 = mul(x, 0.02); f1 = tanh(f0); f2 = mul(f1, 50.0); return f2

x is the score, g the gradient of the program's result, b, n, t and s are the indices, and o0, o1, …
flat arrays that `read` reads, each at an index that it clips to the array. The first letter of a
result is its type: f for float32, i for int32, p for a predicate. Operations are functions of
values; those that differ between floats and integers have two names.

Equal computations have equal code: an operation on the same operands is written once, results are
numbered in order, and arrays in the order in which they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_POSITION = 2**24
"""The largest position of a query or key; up to it, every whole number is exact in float32."""
_MOST_BLOCKS = 65535
_INT32 = 2**31

Span = tuple[int, int]
"""The least and the largest value that an integer may have."""
ANY: Span = (-_INT32, _INT32 - 1)


@dataclass(frozen=True)
class Register:
    """A named value."""

    name: str
    kind: str
    """f, i or p."""
    span: Span = ANY
    """The least and largest value, if it is an integer."""
    of_score: bool = False
    """Whether the value depends on the score."""


Scalar = Register | float | int | bool
"""A value of the code; a number is a constant."""

SCORE, GRADIENT = (Register(name, "f", of_score=True) for name in "xg")
INDICES = tuple(
    Register(name, "i", (0, most))
    for name, most in zip("bnts", (_MOST_BLOCKS,) * 2 + (MOST_POSITION,) * 2, strict=True)
)


class Code:
    """Collects the lines of one function, or of several that share their arrays."""

    def __init__(self, arrays: list[int] | None = None) -> None:
        self.lines: list[str] = []
        self.arrays: list[int] = [] if arrays is None else arrays
        """The arrays that are read, numbered by the program, in the order of o0, o1, …"""
        self._known: dict[tuple[str, ...], Register] = {}
        self._made_by: dict[Register, tuple[str, tuple[Scalar, ...]]] = {}

    def add(self, kind: str, operation: str, *operands: Scalar, span: Span = ANY) -> Register:
        """The result of an operation."""
        words = (kind, operation, *map(text_of, operands))
        if words not in self._known:
            register = Register(f"{kind}{len(self._known)}", kind, span, of_score(*operands))
            self.lines.append(f"{register.name} = {operation}({', '.join(words[2:])})")
            self._known[words] = register
            self._made_by[register] = operation, operands
        return self._known[words]

    def made_by(self, x: Scalar) -> tuple[str, tuple[Scalar, ...]]:
        """The operation that a value is the result of, and its operands; ("", ()) if of none."""
        return self._made_by.get(x, ("", ())) if isinstance(x, Register) else ("", ())

    def read(self, array: int, kind: str, index: Scalar, span: Span = ANY) -> Register:
        """An element of an array."""
        if array not in self.arrays:
            self.arrays.append(array)
        name = Register(f"o{self.arrays.index(array)}", kind)
        return self.add(kind, "read", name, index, span=span)

    def returning(self, result: Scalar) -> str:
        """The code, with the lines that the result depends on, numbered from 0."""
        wanted, needed = {text_of(result)}, list[list[str]]()
        for line in reversed(self.lines):
            words = _words(line)
            if words[0] in wanted:
                needed.insert(0, words)
                wanted |= {*words[2:]}
        names = {words[0]: f"{words[0][0]}{i}" for i, words in enumerate(needed)}
        lines = [
            f"{names[x]} = {operation}({', '.join(names.get(y, y) for y in operands)})"
            for x, operation, *operands in needed
        ]
        last = text_of(result)
        return "; ".join([*lines, f"return {names.get(last, last)}"])


def _words(line: str) -> list[str]:
    """Result, operation and operands of a line."""
    name, _, call = line.partition(" = ")
    operation, _, operands = call.rstrip(")").partition("(")
    return [name, operation, *operands.split(", ")]


def kind_of(x: Scalar) -> str:
    if isinstance(x, Register):
        return x.kind
    if isinstance(x, bool):
        return "p"
    return "i" if isinstance(x, int) else "f"


def span_of(x: Scalar) -> Span:
    """The span of an integer or a predicate as a number."""
    if isinstance(x, Register):
        return (0, 1) if x.kind == "p" else x.span
    return int(x), int(x)


def of_score(*values: Scalar) -> bool:
    """Whether any of the values depends on the score."""
    return any(isinstance(x, Register) and x.of_score for x in values)


def text_of(x: Scalar) -> str:
    if isinstance(x, Register):
        return x.name
    if isinstance(x, bool):
        return "true" if x else "false"
    return str(x) if isinstance(x, int) else repr(float(np.float32(x)))


def fitting(low: int, high: int) -> Span:
    """The span, or any if an integer may have wrapped around."""
    return (low, high) if low >= ANY[0] and high <= ANY[1] else ANY
