"""Lowering of a program's body to a kernel's nodes, one operation of the jaxpr at a time.

What depends neither on the score nor on both t and s, XLA computes beforehand, as small arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from attn_dispatch.programs.inlining import inlined
from attn_dispatch.programs.nodes import (
    COMPARISONS,
    Predicate,
    Tensor,
    Unsupported,
    Value,
    Writer,
    XlaArray,
)
from attn_dispatch.typed_jax import type_of

_UNARY = {
    "tanh", "exp", "log", "logistic", "sin", "cos", "tan", "erf", "sqrt", "rsqrt", "abs", "ceil",
    "floor", "neg",
}  # fmt: skip
_BINARY = {"add", "add_any", "sub", "mul", "div", "max", "min", "pow"}
_OF_INTEGERS = {"add", "sub", "mul", "max", "min", "abs", "neg"}


class NodeLowering:
    """Gives every value of a program's body its form in the kernel."""

    def __init__(
        self,
        mod: str,
        body: ClosedJaxpr,
        inputs: list[Value | None],
        writer: Writer,
        names: list[str],
    ) -> None:
        """Args:
        mod: "score_mod" or "mask_mod".
        body: the body, with one result.
        inputs: each input as a value in the kernel; None if only XLA has it.
        writer: takes the nodes.
        names: each input's name: x, g, b, n, t, s, or an array's.
        """
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
                    raise error.at(equation) from error
                self._values |= dict.fromkeys(equation.outvars)  # as arrays that XLA computes
        return self._value(self._body.jaxpr.outvars[0])

    def _is_outside(self, depends: frozenset[str]) -> bool:
        if depends & {"x", "g", "s"}:
            return False
        # What depends on t alone is computed in the kernel, without an array.
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
        out = type_of(var)
        if out.shape:
            raise Unsupported(
                "array_by_score",
                f"an array {out.dtype.name}{list(out.shape)} is read at a place that depends "
                "on the score, or on both t and s",
            )
        jaxpr, scores = self._body.jaxpr, self._scores
        alone = jaxpr.replace(invars=jaxpr.invars[scores:], outvars=[var])
        body = inlined(ClosedJaxpr(alone, self._body.consts))
        is_float = np.issubdtype(out.dtype, np.floating)
        dtype = "float32" if is_float else "int32"
        made = XlaArray(body, str(body.jaxpr), self._mod, axes, dtype)
        tensor = self._writer.array(made)
        if out.dtype != np.bool_:
            return tensor
        return Predicate("ne", (tensor, 0))

    def _operation(self, equation: JaxprEqn) -> Value:
        name, kind = equation.primitive.name, _kind_of_result(equation)
        given = [self._value(x) for x in equation.invars]
        of = [type_of(x).dtype for x in equation.invars]
        if name == "convert_element_type":
            return self._converted(given[0], of[0], kind)
        if name in ("copy", "copy_p"):
            return given[0]
        if kind == "p":
            return self._predicate(name, given, of)
        return self._arithmetic(name, given, kind, equation.params)

    def _arithmetic(
        self, name: str, given: list[Value], kind: str, params: dict[str, int]
    ) -> Value:
        writer = self._writer
        if name == "select_n" and len(given) == 3:
            condition, no, yes = given
            return writer.select(condition, yes, no, kind)
        if kind == "i" and name not in _OF_INTEGERS:
            raise Unsupported("integers", f"{name} of integers")
        if name in _BINARY:
            return writer.arithmetic(kind, name.removesuffix("_any"), *given)
        if name in _UNARY:
            return writer.node(kind, name, writer.computed(given[0], kind))
        if name == "integer_pow":
            return self._power(given[0], params["y"], kind)
        if name in _IN_STEPS:
            return _IN_STEPS[name](writer, writer.computed(given[0], kind), kind)
        raise Unsupported("operation", f"{name} is not among cuDNN's operations")

    def _converted(self, x: Value, dtype: np.dtype, kind: str) -> Value:
        before = _kind(dtype)
        if before == kind:
            return x
        if before == "p":
            one, zero = (1.0, 0.0) if kind == "f" else (1, 0)
            return self._writer.select(x, one, zero, kind)
        if kind == "f":
            if not isinstance(x, Tensor):
                return float(x)  # pyright: ignore[reportArgumentType]
            return self._writer.converted(self._writer.computed(x, "i"))
        raise Unsupported("conversion", f"convert_element_type from {np.dtype(dtype).name}")

    def _predicate(self, name: str, given: list[Value], of: list[np.dtype]) -> Value:
        if name in COMPARISONS:
            if _kind(of[0]) == "p":
                raise Unsupported("booleans", f"{name} of booleans")
            if _kind(of[0]) == "f":
                raise Unsupported(
                    "comparison_of_floats",
                    f"{name} compares floats, and cuDNN compares integers alone",
                )
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
        raise Unsupported("operation", f"{name} is not among cuDNN's operations")

    def _power(self, x: Value, exponent: int, kind: str) -> Value:
        writer = self._writer
        base = writer.computed(x, kind)
        if exponent == 0:
            return 1.0 if kind == "f" else 1
        result = base
        for _ in range(min(abs(exponent), 16) - 1):
            result = writer.node(kind, "mul", result, base)
        if abs(exponent) > 16:
            raise Unsupported("power", f"integer_pow by {exponent}")
        return writer.node(kind, "reciprocal", result) if exponent < 0 else result


def _kind_of_result(equation: JaxprEqn) -> str:
    """The kind of an operation's result, if kernels can compute the operation at all."""
    name = equation.primitive.name
    if len(equation.outvars) > 1:
        raise Unsupported("operation", f"{name} is not among cuDNN's operations")
    out = type_of(equation.outvars[0])
    if out.shape or any(type_of(x).shape for x in equation.invars):
        raise Unsupported("arrays", f"{name} of arrays, at a place that depends on both t and s")
    if out.dtype.name not in ("float32", "int32", "bool"):
        raise Unsupported(
            "dtype", f"{name} in {out.dtype.name}, where a kernel has float32 and int32"
        )
    return _kind(out.dtype)


def _one_minus_square(writer: Writer, x: Tensor, kind: str) -> Tensor:
    negative = writer.node(kind, "mul", writer.node(kind, "mul", x, x), -1.0)
    return writer.node(kind, "add", negative, 1.0)


def _log1p(writer: Writer, x: Tensor, kind: str) -> Tensor:
    return writer.node(kind, "log", writer.node(kind, "add", x, 1.0))


def _expm1(writer: Writer, x: Tensor, kind: str) -> Tensor:
    return writer.node(kind, "add", writer.node(kind, "exp", x), -1.0)


def _exp2(writer: Writer, x: Tensor, kind: str) -> Tensor:
    return writer.node(kind, "exp", writer.node(kind, "mul", x, float(np.log(2.0))))


_IN_STEPS: dict[str, Callable[[Writer, Tensor, str], Tensor]] = {
    "square": lambda writer, x, kind: writer.node(kind, "mul", x, x),
    "one_minus_square": _one_minus_square,
    "log1p": _log1p,
    "expm1": _expm1,
    "exp2": _exp2,
}
"""JAX's operations of one operand that take several of cuDNN's, or one by another name."""


def _kind(dtype: np.dtype) -> str:
    if dtype == np.bool_:
        return "p"
    return "f" if np.issubdtype(dtype, np.floating) or str(dtype) == "bfloat16" else "i"


def _number(x: ArrayLike) -> Value:
    number = np.asarray(x)
    if number.dtype == np.bool_:
        return bool(number)
    return int(number) if _kind(number.dtype) == "i" else float(number)
