"""A program as nodes of a kernel's graph: one operation each, on the scores of all pairs.

As text, of which the C++ side builds a graph, one node after the other:

    i0 = sub t s; i1 = abs i0; f2 = convert i1; f3 = mul f2 o0; f4 = sub x f3

x is the score, g the gradient of what the program made of it, t and s are the positions, o0, o1, …
arrays that broadcast to the scores, and #… numbers. The first letter of a result is its type: f for
float32, i for int32, p for a predicate.

What cuDNN's engines take, found out by planning with 9.12, 9.19 and 9.28: the first operand of
every node must be computed in the kernel; predicates come from comparisons of int32, and nothing
else is done with them but to select; there is no lookup.

What does not depend on the score, and not on t and s at once, XLA computes beforehand: such an
array is small.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from attn_dispatch.programs.flat import flat

_UNARY = {
    "tanh", "exp", "log", "logistic", "sin", "cos", "tan", "erf", "sqrt", "rsqrt", "abs", "ceil",
    "floor", "neg",
}  # fmt: skip
_BINARY = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div", "max": "max",
           "min": "min", "pow": "pow"}  # fmt: skip
_COMMUTATIVE = {"add", "mul", "max", "min"}
_OF_INTEGERS = {"add", "sub", "mul", "max", "min", "abs", "neg"}
_COMPARISONS = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
"""Each with its opposite."""
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_MAY_BE_NAN = {"log", "div", "pow", "sqrt", "rsqrt", "reciprocal", "tan", "exp"}


class Unsupported(Exception):
    """What a kernel cannot be told of a program."""


@dataclass(frozen=True)
class Register:
    """A value in the kernel: of a node, an index, the score, or an array from outside."""

    name: str
    kind: str
    """f or i, as in its name unless it is an index or an array."""

    @property
    def is_computed(self) -> bool:
        return not self.name.startswith("o")


@dataclass(frozen=True)
class Predicate:
    """What may be selected by: a comparison, or others combined."""

    operation: str
    """A comparison, "and", "or" or "not"."""
    operands: tuple[Any, ...]


Value = Register | Predicate | int | float | bool


@dataclass(frozen=True)
class Outside:
    """An array that XLA computes: a value of a program, for the axes that it depends on."""

    body: ClosedJaxpr = field(compare=False, repr=False)
    """Of b, n, t, s and the mod's arrays the one value."""
    text: str
    """Of `body`: the same value is the same array."""
    mod: str
    axes: str
    """Of "bnts" those that it depends on."""
    dtype: str


@dataclass(frozen=True)
class RowKeys:
    """An array that lengths and a band decide: of each query its first key, or the one past its
    last, which is 0 where there is no query."""

    which: str
    """"first" or "end"."""
    border: Outside | None = None
    """What a mask_mod has on that side; the narrower of both counts."""
    dtype: str = "int32"

    @property
    def axes(self) -> str:
        own = "" if self.border is None else self.border.axes
        return "".join(x for x in "bnt" if x in own + "bt")


class Writer:
    """Writes nodes; the same operation of the same operands is written once."""

    def __init__(
        self, *, is_backward: bool = False, first_row: int = 0, is_past: bool = False
    ) -> None:
        """Args:
        is_backward: whether a backward pass reads the arrays.
        first_row: t of the kernel's first row.
        is_past: whether all pairs that count are of a key at or before the query.
        """
        self.is_backward = is_backward
        self._is_past = is_past
        self.lines: list[str] = []
        self.outside: list[Outside | RowKeys] = []
        self._known: dict[tuple[str, ...], Register] = {}
        self._integers: dict[Register, Register] = {}
        """What a float was converted from."""
        self.t = T
        """The position of the query."""
        if first_row:
            self.t = self.node("i", "add", T, first_row)

    def node(self, kind: str, operation: str, *operands: Value) -> Register:
        if self._is_past and (distance := self._distance(operation, *operands)):
            return distance
        text = (kind, operation, *(_text(x) for x in operands))
        if text not in self._known:
            register = Register(f"{kind}{len(self._known)}", kind)
            self.lines.append(f"{register.name} = {' '.join(text[1:])}")
            self._known[text] = register
        return self._known[text]

    def converted(self, x: Register) -> Register:
        """A whole number as a float."""
        number = self.node("f", "convert", x)
        self._integers[number] = x
        return number

    def _distance(self, operation: str, *operands: Value) -> Register | None:
        """t - s, if that is what |t - s|, |s - t| or the larger of t - s and 0 is."""
        signs = {("abs", "sub t s"): (), ("abs", "sub s t"): (), ("max", "sub t s"): (0,)}
        for (name, inner), others in signs.items():
            words = [self.t.name if x == "t" else x for x in inner.split()]
            found = self._known.get(("i", *words))
            if found is not None and name == operation and operands == (found, *others):
                return self.node("i", "sub", self.t, S)
        return None

    def array(self, outside: Outside | RowKeys) -> Register:
        """A register for an array.

        What cuDNN reads right on an H200 (9.19, 9.28): by n, by t, and by b for each t; by s in the
        forward pass alone.
        """
        if self.is_backward and "s" in outside.axes:
            raise Unsupported(
                "an array is read by s, which cuDNN's backward pass does not do right"
            )
        if {"b", "s"} <= {*outside.axes}:
            raise Unsupported("an array is read by b and s, which would be as large as the scores")
        if "b" in outside.axes and isinstance(outside, Outside):
            outside = replace(outside, axes="".join(x for x in "bnts" if x in outside.axes + "t"))
        kind = "f" if outside.dtype == "float32" else "i"
        if outside not in self.outside:
            self.outside.append(outside)
        return Register(f"o{self.outside.index(outside)}", kind)

    def computed(self, x: Value, kind: str) -> Register:
        """x as the first operand of a node has to be."""
        if isinstance(x, Register) and x.is_computed:
            return x
        zero = self.node("i", "mul", T, 0)
        if kind == "f":
            zero = self.converted(zero)
        return self.node(kind, "add", zero, x)

    def arithmetic(self, kind: str, operation: str, x: Value, y: Value) -> Register:
        if (operation in ("add", "sub") and y == 0) or (operation in ("mul", "div") and y == 1):
            return self.computed(x, kind)
        if (operation == "add" and x == 0) or (operation == "mul" and x == 1):
            return self.computed(y, kind)
        if operation == "div" and isinstance(y, float) and _has_reciprocal(y):
            return self.arithmetic(kind, "mul", x, 1 / y)
        first = isinstance(x, Register) and x.is_computed
        second = isinstance(y, Register) and y.is_computed
        if operation == "mul" and kind == "f":
            # It multiplies whole numbers by others as they are: ALiBi's distances by its slopes.
            if first and x in self._integers and not second:
                return self.node(kind, operation, self._integers[x], y)
            if second and y in self._integers and not first:
                return self.node(kind, operation, self._integers[y], x)
        if first or not second:
            return self.node(kind, operation, self.computed(x, kind), y)
        if operation in _COMMUTATIVE:
            return self.node(kind, operation, y, x)
        if operation == "sub":
            minus = -1 if kind == "i" else -1.0
            return self.node(kind, "add", self.node(kind, "mul", y, minus), x)
        if operation == "div":
            return self.node(kind, "mul", self.node(kind, "reciprocal", y), x)
        return self.node(kind, operation, self.computed(x, kind), y)

    def select(self, condition: Any, yes: Value, no: Value, kind: str) -> Value:
        """yes where the condition holds, else no."""
        if isinstance(condition, bool):
            return yes if condition else no
        if yes == no:
            return yes
        operation, operands = condition.operation, condition.operands
        if operation == "not":
            return self.select(operands[0], no, yes, kind)
        if operation == "and":
            return self.select(operands[0], self.select(operands[1], yes, no, kind), no, kind)
        if operation == "or":
            return self.select(operands[0], yes, self.select(operands[1], yes, no, kind), kind)
        is_ready = isinstance(yes, Register) and yes.is_computed
        if not is_ready and isinstance(no, Register) and no.is_computed:
            yes, no, operation = no, yes, _COMPARISONS[operation]
        return self.node(
            kind, "select", self.computed(yes, kind), no, self._compared(operation, *operands)
        )

    def _compared(self, operation: str, x: Value, y: Value) -> Register:
        if not (isinstance(x, Register) and x.is_computed):
            x, y, operation = y, x, _MIRRORED[operation]
        return self.node("p", operation, self.computed(x, "i"), y)

    def result(self, x: Value) -> Register:
        """x as the result of a node that is the last one written."""
        computed = self.computed(x, "f")
        if not self.lines or not self.lines[-1].startswith(f"{computed.name} ="):
            last = Register(f"f{len(self._known)}", "f")
            self.lines.append(f"{last.name} = add {computed.name} #0.0")
            self._known[(last.name,)] = last
            return last
        return computed

    def needed(self, result: Register) -> list[str]:
        """The nodes that a result needs: what nobody reads would be a result as well."""
        wanted, needed = {result.name}, []
        for line in reversed(self.lines):
            name, _, _, *words = line.split()
            if name in wanted:
                needed.append(line)
                wanted |= {*words}
        return needed[::-1]


SCORE, GRADIENT = Register("x", "f"), Register("g", "f")
T, S = Register("t", "i"), Register("s", "i")


def lowered(
    mod: str, body: ClosedJaxpr, inputs: list[Value | None], writer: Writer, names: list[str]
) -> Value:
    """The one result of a program's body in the kernel.

    Args:
      mod: score_mod or mask_mod.
      inputs: what each input is in the kernel; None where it is known outside alone.
      names: each input's name: x, g, b, n, t, s, or an array's.
    """
    return _Lowering(mod, body, inputs, writer, names).result()


class _Lowering:
    def __init__(
        self,
        mod: str,
        body: ClosedJaxpr,
        inputs: list[Value | None],
        writer: Writer,
        names: list[str],
    ) -> None:
        self._mod, self._body, self._writer = mod, body, writer
        self._scores = sum(x in ("x", "g") for x in names)
        self._values: dict[Var, Value | None] = {}
        self._depends: dict[Var, frozenset[str]] = {}
        for var, value, name in zip(body.jaxpr.invars, inputs, names, strict=True):
            self._values[var], self._depends[var] = value, frozenset({name})

    def result(self) -> Value:
        for equation in self._body.jaxpr.eqns:
            depends = frozenset[str]().union(
                *(self._depends[x] for x in equation.invars if isinstance(x, Var))
            )
            for out in equation.outvars:
                self._depends[out] = depends
            if self._is_outside(depends):
                self._values |= dict.fromkeys(equation.outvars)
                continue
            try:
                self._values[equation.outvars[0]] = self._operation(equation)
            except Unsupported as error:
                if depends & {"x", "g"} or {"t", "s"} <= depends:
                    raise _with_line(error, equation) from error
                self._values |= dict.fromkeys(equation.outvars)  # arrays after all
        return self._value(self._body.jaxpr.outvars[0])

    def _is_outside(self, depends: frozenset[str]) -> bool:
        if depends & {"x", "g", "s"}:
            return False
        # Of t alone: in the kernel it takes no array.
        return depends != {"t"}

    def _value(self, x: Var | Literal) -> Value:
        if isinstance(x, Literal):
            return _number(x.val)
        value = self._values[x]
        if value is None:
            value = self._values[x] = self._from_outside(x)
        return value

    def _from_outside(self, var: Var) -> Value:
        depends = self._depends[var]
        axes = "".join(x for x in "bnts" if x in depends)
        if _type(var).shape:
            raise Unsupported(
                f"an array {_type(var).dtype.name}{list(_type(var).shape)} is read at a place that "
                "depends on the score, or on both t and s"
            )
        jaxpr, scores = self._body.jaxpr, self._scores
        alone = jaxpr.replace(invars=jaxpr.invars[scores:], outvars=[var])
        body = flat(ClosedJaxpr(alone, self._body.consts))
        is_float = np.issubdtype(_type(var).dtype, np.floating)
        dtype = "float32" if is_float else "int32"
        made = Outside(body, str(body.jaxpr), self._mod, axes, dtype)
        register = self._writer.array(made)
        if _type(var).dtype != np.bool_:
            return register
        return Predicate("ne", (register, 0))

    def _operation(self, equation: JaxprEqn) -> Value:
        name = equation.primitive.name
        if len(equation.outvars) > 1:
            raise Unsupported(f"{name} is not among cuDNN's operations")
        out = _type(equation.outvars[0])
        if out.shape or any(_type(x).shape for x in equation.invars):
            raise Unsupported(f"{name} of arrays, at a place that depends on both t and s")
        if out.dtype.name not in ("float32", "int32", "bool"):
            raise Unsupported(f"{name} in {out.dtype.name}, where a kernel has float32 and int32")
        given = [self._value(x) for x in equation.invars]
        kind = _kind(out.dtype)
        of = [_type(x).dtype for x in equation.invars]
        writer = self._writer
        if name == "convert_element_type":
            return self._converted(given[0], of[0], kind)
        if name in ("copy", "copy_p"):
            return given[0]
        if kind == "p":
            return self._predicate(name, given, of)
        if name == "select_n" and len(given) == 3:
            condition, no, yes = given
            if not isinstance(condition, Predicate | bool):
                raise Unsupported("select_n by a number")
            return writer.select(condition, yes, no, kind)
        if kind == "i" and name not in _OF_INTEGERS:
            raise Unsupported(f"{name} of integers")
        if name in _BINARY:
            return writer.arithmetic(kind, _BINARY[name], *given)
        if name in _UNARY:
            return writer.node(kind, name, writer.computed(given[0], kind))
        if name == "square":
            x = writer.computed(given[0], kind)
            return writer.node(kind, "mul", x, x)
        if name == "one_minus_square":
            x = writer.computed(given[0], kind)
            return writer.node(
                kind, "add", writer.node(kind, "mul", writer.node(kind, "mul", x, x), -1.0), 1.0
            )
        if name == "integer_pow":
            return self._power(given[0], equation.params["y"], kind)
        if name in ("log1p", "expm1"):
            x = writer.computed(given[0], kind)
            if name == "log1p":
                return writer.node(kind, "log", writer.node(kind, "add", x, 1.0))
            return writer.node(kind, "add", writer.node(kind, "exp", x), -1.0)
        if name == "exp2":
            x = writer.computed(given[0], kind)
            return writer.node(kind, "exp", writer.node(kind, "mul", x, float(np.log(2.0))))
        raise Unsupported(f"{name} is not among cuDNN's operations")

    def _converted(self, x: Value, dtype: Any, kind: str) -> Value:
        before = _kind(dtype)
        if before == kind:
            return x
        if before == "p":
            one, zero = (1.0, 0.0) if kind == "f" else (1, 0)
            return self._writer.select(x, one, zero, kind)
        if kind == "f":
            if not isinstance(x, Register):
                return float(x)  # pyright: ignore[reportArgumentType]
            return self._writer.converted(self._writer.computed(x, "i"))
        raise Unsupported(f"convert_element_type from {np.dtype(dtype).name}")

    def _predicate(self, name: str, given: list[Any], of: list[Any]) -> Value:
        if name in _COMPARISONS:
            if _kind(of[0]) == "p":
                raise Unsupported(f"{name} of booleans")
            if _kind(of[0]) == "f":
                raise Unsupported(f"{name} compares floats, and cuDNN compares integers alone")
            return Predicate(name, tuple(given))
        if name in ("and", "or"):
            x, y = given
            for one, other in ((x, y), (y, x)):
                if isinstance(one, bool):
                    return other if one == (name == "and") else one
            return Predicate(name, (x, y))
        if name == "not":
            return not given[0] if isinstance(given[0], bool) else Predicate("not", (given[0],))
        if name == "xor":
            x, y = given
            return Predicate(
                "or",
                (
                    Predicate("and", (x, Predicate("not", (y,)))),
                    Predicate("and", (Predicate("not", (x,)), y)),
                ),
            )
        raise Unsupported(f"{name} of booleans")

    def _power(self, x: Value, exponent: int, kind: str) -> Value:
        writer = self._writer
        base = writer.computed(x, kind)
        if exponent == 0:
            return 1.0 if kind == "f" else 1
        result = base
        for _ in range(min(abs(exponent), 16) - 1):
            result = writer.node(kind, "mul", result, base)
        if abs(exponent) > 16:
            raise Unsupported(f"integer_pow by {exponent}")
        return writer.node(kind, "reciprocal", result) if exponent < 0 else result


def _has_reciprocal(x: float) -> bool:
    """Whether 1 / x is a normal number as well, in float32."""
    return 2.0**-126 < abs(x) < 2.0**126


def may_be_nan(lines: list[str]) -> bool:
    """Whether finite operands may become something else."""
    operations = (line.split()[2:] for line in lines)
    return any(
        name in _MAY_BE_NAN and not (name == "div" and y[-1].startswith("#") and float(y[-1][1:]))
        for name, *y in operations
    )


def _with_line(error: Unsupported, equation: JaxprEqn) -> Unsupported:
    """The same, and where the operation was written."""
    where = source_info_util.summarize(equation.source_info)
    found = re.search(r"([^/\\\s]+\.\w+:\d+)", where)
    if found is None or " (at " in str(error):
        return error
    return Unsupported(f"{error} (at {found[1]})")


def _type(x: Var | Literal) -> Any:
    """A value's shape and dtype."""
    return x.aval


def _kind(dtype: Any) -> str:
    if dtype == np.bool_:
        return "p"
    return "f" if np.issubdtype(dtype, np.floating) or str(dtype) == "bfloat16" else "i"


def _number(x: Any) -> Value:
    x = np.asarray(x)
    return x.item() if x.dtype == np.bool_ else (int(x) if _kind(x.dtype) == "i" else float(x))


def _text(x: Value) -> str:
    if isinstance(x, Register):
        return x.name
    assert not isinstance(x, Predicate)
    return f"#{x}" if isinstance(x, int) else f"#{np.float32(x)!s}"
