"""A program as nodes of a kernel's graph: each is one operation on the scores of all pairs.

The C++ side builds the graph from their text, one node after the other:

    i0 = sub t s; i1 = abs i0; f2 = convert i1; f3 = mul f2 o0; f4 = sub x f3

x is the score, g the gradient of the program's result, t and s are the positions, o0, o1, … arrays
that broadcast to the scores, and #… numbers. The first letter of a result is its type: f for
float32, i for int32, p for a predicate.

Planning with cuDNN 9.12, 9.19 and 9.28 showed what its engines take: the first operand of every
node must be computed in the kernel; predicates come from comparisons of int32 and can only be
selected by; there is no lookup.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

_COMMUTATIVE = {"add", "mul", "max", "min"}
COMPARISONS = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
"""Each comparison with its negation."""
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_MAY_BE_NAN = {"log", "div", "pow", "sqrt", "rsqrt", "reciprocal", "tan", "exp"}


class Unsupported(Exception):
    """An operation of a program that a kernel has no node for."""

    def __init__(self, kind: str, text: str, line: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        """A name of the limit, for the rule of a `Reason`."""
        self.text = text
        self.line = line
        """The line of the program that has the operation, "model.py:7"; "" if it is unknown."""

    def at(self, equation: JaxprEqn) -> Unsupported:
        """The error, with the line that the operation was written in."""
        where = source_info_util.summarize(equation.source_info)
        found = re.search(r"([^/\\\s]+\.\w+:\d+)", where)
        return self if found is None or self.line else Unsupported(self.kind, self.text, found[1])


@dataclass(frozen=True)
class Tensor:
    """A value in the kernel: a node's result, an index, the score, or an array from XLA."""

    name: str
    kind: str
    """f or i: the first letter of the name, unless it is an index or an array."""

    @property
    def is_computed(self) -> bool:
        return not self.name.startswith("o")


@dataclass(frozen=True)
class Predicate:
    """A condition to select by: a comparison, or a combination of conditions."""

    operation: str
    """A comparison, "and", "or" or "not"."""
    operands: tuple[Value, ...]


Value = Tensor | Predicate | int | float | bool


@dataclass(frozen=True)
class XlaArray:
    """An array that XLA computes: a value of a program, along the axes that it depends on."""

    body: ClosedJaxpr = field(compare=False, repr=False)
    """The value as a function of b, n, t, s and the mod's arrays."""
    text: str
    """The text of `body`, by which equal values share an array."""
    mod: str
    axes: str
    """The letters of "bnts" that it depends on."""
    dtype: str


@dataclass(frozen=True)
class RowKeys:
    """An array of each query's first key, or of the key after its last, from lengths and the band.

    The end is 0 where there is no query.
    """

    which: str
    """"first" or "end"."""
    border: XlaArray | None = None
    """The bound of a mask_mod on that side; the narrower of both counts."""
    dtype: str = "int32"

    @property
    def axes(self) -> str:
        own = "" if self.border is None else self.border.axes
        return "".join(x for x in "bnt" if x in own + "bt")


@dataclass(frozen=True)
class HeadSlopes:
    """ALiBi's slopes, one per head."""

    axes: str = "n"
    dtype: str = "float32"


HEAD_SLOPES = HeadSlopes()
NodeArray = XlaArray | RowKeys | HeadSlopes
"""An array that nodes read."""


class Writer:
    """Collects nodes; the same operation on the same operands is written once."""

    def __init__(
        self,
        *,
        is_backward: bool = False,
        first_row: int = 0,
        is_past: bool = False,
        has_exact_floats: bool = True,
    ) -> None:
        """Args:
        is_backward: whether a backward pass reads the arrays.
        first_row: t of the kernel's first row.
        is_past: whether every pair that attends has a key at or before the query.
        has_exact_floats: whether every position is exact as a float.
        """
        self.is_backward = is_backward
        self._is_past = is_past
        self._has_exact_floats = has_exact_floats
        self.lines: list[str] = []
        self.arrays: list[NodeArray] = []
        self._known: dict[tuple[str, ...], Tensor] = {}
        self._text_of: dict[Tensor, tuple[str, ...]] = {}
        self._integers: dict[Tensor, Tensor] = {}
        """The integer that each float was converted from."""
        self.t = T
        """The position of the query."""
        if first_row:
            self.t = self.node("i", "add", T, first_row)

    def node(self, kind: str, operation: str, *operands: Value) -> Tensor:
        if self._is_past and (distance := self._distance(operation, *operands)):
            return distance
        text = (kind, operation, *(_text(x) for x in operands))
        if text not in self._known:
            tensor = Tensor(f"{kind}{len(self._known)}", kind)
            self.lines.append(f"{tensor.name} = {' '.join(text[1:])}")
            self._known[text], self._text_of[tensor] = tensor, text
        return self._known[text]

    def converted(self, x: Tensor) -> Tensor:
        """A whole number as a float."""
        if self._has_exact_floats and (distance := self._float_distance(x)):
            return distance
        number = self.node("f", "convert", x)
        self._integers[number] = x
        return number

    def _float_distance(self, x: Tensor) -> Tensor | None:
        """A difference of positions, or its absolute value, computed in floats.

        A position is then converted once for a row, or a column, of scores: a forward pass with
        ALiBi has 0.86 of the speed without ALiBi, and 0.78 with integer distances (H200, 9.19).
        """
        match self._text_of.get(x):
            case ("i", "abs", inner):
                distance = self._float_distance(Tensor(inner, "i"))
                return None if distance is None else self.node("f", "abs", distance)
            case ("i", "sub", *both) if all(map(self._is_position, both)):
                floats = (self.node("f", "convert", Tensor(y, "i")) for y in both)
                return self.node("f", "sub", *floats)
            case _:
                return None

    def _is_position(self, name: str) -> bool:
        """Whether the value is t or s, or one of them plus a constant of at most 2^22."""
        if name in (T.name, S.name):
            return True
        match self._text_of.get(Tensor(name, "i")):
            case ("i", "add", inner, number) if number.startswith("#"):
                return abs(int(number[1:])) <= 2**22 and self._is_position(inner)
            case _:
                return False

    def _distance(self, operation: str, *operands: Value) -> Tensor | None:
        """t - s in place of |t - s|, |s - t| or max(t - s, 0): the same where no key is after t."""
        signs = {("abs", "sub t s"): (), ("abs", "sub s t"): (), ("max", "sub t s"): (0,)}
        for (name, inner), others in signs.items():
            words = [self.t.name if x == "t" else x for x in inner.split()]
            found = self._known.get(("i", *words))
            if found is not None and name == operation and operands == (found, *others):
                return self.node("i", "sub", self.t, S)
        return None

    def array(self, array: NodeArray) -> Tensor:
        """A tensor for an array.

        cuDNN reads arrays correctly by n, by t, and by b and t; by s in the forward pass alone
        (H200, 9.19, 9.28).
        """
        if self.is_backward and "s" in array.axes:
            raise Unsupported(
                "array_by_s", "an array is read by s, which cuDNN's backward pass computes wrongly"
            )
        if {"b", "s"} <= {*array.axes}:
            raise Unsupported(
                "array_by_b_and_s",
                "an array is read by b and s, which would be as large as the scores",
            )
        if "b" in array.axes and isinstance(array, XlaArray):
            array = replace(array, axes="".join(x for x in "bnts" if x in array.axes + "t"))
        kind = "f" if array.dtype == "float32" else "i"
        if array not in self.arrays:
            self.arrays.append(array)
        return Tensor(f"o{self.arrays.index(array)}", kind)

    def computed(self, x: Value, kind: str) -> Tensor:
        """x as a value computed in the kernel, which the first operand of a node must be."""
        if isinstance(x, Tensor) and x.is_computed:
            return x
        zero = self.node("i", "mul", T, 0)
        if kind == "f":
            zero = self.converted(zero)
        return self.node(kind, "add", zero, x)

    def arithmetic(self, kind: str, operation: str, x: Value, y: Value) -> Tensor:
        if (operation in ("add", "sub") and y == 0) or (operation in ("mul", "div") and y == 1):
            return self.computed(x, kind)
        if (operation == "add" and x == 0) or (operation == "mul" and x == 1):
            return self.computed(y, kind)
        if operation == "div" and isinstance(y, float) and _has_reciprocal(y):
            return self.arithmetic(kind, "mul", x, 1 / y)
        if operation == "mul" and kind == "f" and (product := self._product_of_integer(x, y)):
            return product
        if _is_computed(x) or not _is_computed(y):
            return self.node(kind, operation, self.computed(x, kind), y)
        return self._with_second_computed(kind, operation, x, y)

    def _product_of_integer(self, x: Value, y: Value) -> Tensor | None:
        """The product where just one factor is computed, from an integer; else None.

        It takes that integer without conversion: ALiBi's distances.
        """
        for one, other in ((x, y), (y, x)):
            if isinstance(one, Tensor) and one in self._integers and _is_computed(one):
                if not _is_computed(other):
                    return self.node("f", "mul", self._integers[one], other)
        return None

    def _with_second_computed(self, kind: str, operation: str, x: Value, y: Value) -> Tensor:
        """An operation whose second operand alone is computed, which a node must have first."""
        if operation in _COMMUTATIVE:
            return self.node(kind, operation, y, x)
        if operation == "sub":
            minus = -1 if kind == "i" else -1.0
            return self.node(kind, "add", self.node(kind, "mul", y, minus), x)
        if operation == "div":
            return self.node(kind, "mul", self.node(kind, "reciprocal", y), x)
        return self.node(kind, operation, self.computed(x, kind), y)

    def select(self, condition: Value, yes: Value, no: Value, kind: str) -> Value:
        """`yes` where the condition holds, else `no`."""
        if isinstance(condition, bool):
            return yes if condition else no
        if not isinstance(condition, Predicate):
            raise Unsupported("select_by_number", "select_n by a number")
        if yes == no:
            return yes
        operation, operands = condition.operation, condition.operands
        if operation == "not":
            return self.select(operands[0], no, yes, kind)
        if operation == "and":
            return self.select(operands[0], self.select(operands[1], yes, no, kind), no, kind)
        if operation == "or":
            return self.select(operands[0], yes, self.select(operands[1], yes, no, kind), kind)
        is_ready = isinstance(yes, Tensor) and yes.is_computed
        if not is_ready and isinstance(no, Tensor) and no.is_computed:
            yes, no, operation = no, yes, COMPARISONS[operation]
        return self.node(
            kind, "select", self.computed(yes, kind), no, self._compared(operation, *operands)
        )

    def _compared(self, operation: str, x: Value, y: Value) -> Tensor:
        if not (isinstance(x, Tensor) and x.is_computed):
            x, y, operation = y, x, _MIRRORED[operation]
        return self.node("p", operation, self.computed(x, "i"), y)

    def result(self, x: Value) -> Tensor:
        """x as the result of the last node written."""
        computed = self.computed(x, "f")
        if not self.lines or not self.lines[-1].startswith(f"{computed.name} ="):
            last = Tensor(f"f{len(self._known)}", "f")
            self.lines.append(f"{last.name} = add {computed.name} #0.0")
            self._known[(last.name,)] = last
            return last
        return computed

    def needed(self, result: Tensor) -> list[str]:
        """The nodes that a result depends on: cuDNN would return one that no node reads."""
        wanted, needed = {result.name}, list[str]()
        for line in reversed(self.lines):
            name, _, _, *words = line.split()
            if name in wanted:
                needed.append(line)
                wanted |= {*words}
        return needed[::-1]


SCORE, GRADIENT = Tensor("x", "f"), Tensor("g", "f")
T, S = Tensor("t", "i"), Tensor("s", "i")


def _is_computed(x: Value) -> bool:
    return isinstance(x, Tensor) and x.is_computed


def _has_reciprocal(x: float) -> bool:
    """Whether 1 / x is a normal float32 number too."""
    return 2.0**-126 < abs(x) < 2.0**126


def may_be_nan(lines: list[str]) -> bool:
    """Whether a node may turn finite operands into infinity or NaN."""
    operations = (line.split()[2:] for line in lines)
    return any(
        name in _MAY_BE_NAN and not (name == "div" and y[-1].startswith("#") and float(y[-1][1:]))
        for name, *y in operations
    )


def _text(x: Value) -> str:
    if isinstance(x, Tensor):
        return x.name
    assert not isinstance(x, Predicate)
    return f"#{x}" if isinstance(x, int) else f"#{np.float32(x)!s}"
