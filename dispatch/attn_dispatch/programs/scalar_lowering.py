"""Lowering of a program's body to straight-line code, one operation of the jaxpr at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from attn_dispatch.programs import scalar_operations
from attn_dispatch.programs.array_views import View
from attn_dispatch.programs.inlining import results_of
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.programs.scalar_code import Code, Register, Scalar
from attn_dispatch.typed_jax import type_of

Value = Scalar | View | tuple[Scalar, ...]
"""A scalar, a part of an array, or a short list of indices."""


def lowered(body: ClosedJaxpr, inputs: Sequence[Register | View], code: Code) -> Scalar:
    """The result of a body of one scalar result, as a value of the code.

    Raises:
      Unsupported: there is no code for an operation, which is named with its line.
    """
    return _Lowering(body, inputs, code).result()


class _Lowering:
    def __init__(self, body: ClosedJaxpr, inputs: Sequence[Register | View], code: Code) -> None:
        self._jaxpr, self._code, self._name = body.jaxpr, code, ""
        self._values: dict[Var, Value] = dict(zip(body.jaxpr.invars, inputs, strict=True))

    def result(self) -> Scalar:
        for equation in self._jaxpr.eqns:
            self._name = equation.primitive.name
            try:
                self._values[equation.outvars[0]] = self._result_of(equation)
            except Unsupported as error:
                raise error.at(equation) from error
        return self._scalar(self._jaxpr.outvars[0])

    def _result_of(self, equation: JaxprEqn) -> Value:
        name, params = equation.primitive.name, equation.params
        if len(equation.outvars) > 1:
            raise _unknown(name)
        if name in _OF_ARRAYS:
            result = _OF_ARRAYS[name](self, equation, params)
            if result is None:
                raise Unsupported(
                    "arrays", f"{name} makes an array; only single elements of arrays can be read"
                )
            return result
        if name in ("copy", "copy_p", "stop_gradient", "optimization_barrier"):
            return self._value(equation.invars[0])
        if name == "convert_element_type" and (whole := self._converted_view(equation)):
            return whole
        return self._operation(equation, params)

    def _operation(self, equation: JaxprEqn, params: Mapping[str, object]) -> Scalar:
        name = equation.primitive.name
        out = type_of(equation.outvars[0])
        if out.shape:
            raise Unsupported("arrays", f"{name} of arrays; only single elements can be computed")
        kind = _kind_of(out.dtype, name)
        given = [self._scalar(x) for x in equation.invars]
        if not any(isinstance(x, Register) for x in given):
            return self._constant(equation)
        result = scalar_operations.of(name, self._code, kind, given, params)
        if result is None:
            raise _unknown(name)
        return result

    def _constant(self, equation: JaxprEqn) -> Scalar:
        """The result of an operation on constants."""
        given = [np.asarray(self._scalar(x), type_of(x).dtype) for x in equation.invars]
        with jax.ensure_compile_time_eval():
            (result,) = results_of(equation.primitive, given, equation.params)  # pyright: ignore[reportArgumentType]
        return _number(np.asarray(result))

    def _value(self, x: Var | Literal) -> Value:
        return _number(np.asarray(x.val)) if isinstance(x, Literal) else self._values[x]

    def _scalar(self, x: Var | Literal) -> Scalar:
        value = self._value(x)
        if isinstance(value, View):
            if not value.has_one_element:
                raise Unsupported(
                    "arrays", f"{self._name} of an array; kernels read single elements"
                )
            return value.element(self._code)
        if isinstance(value, tuple):
            if len(value) != 1:
                raise Unsupported("arrays", f"{self._name} of an array of indices")
            return value[0]
        return value

    # ---- operations on arrays

    def _converted_view(self, equation: JaxprEqn) -> View | None:
        """A whole array in another dtype: kernels have float32 and int32 whatever it is."""
        value = self._value(equation.invars[0])
        if not isinstance(value, View) or value.has_one_element:
            return None
        kind = _kind_of(type_of(equation.outvars[0]).dtype, "convert_element_type")
        return value if kind == value.kind else None

    def slice(self, equation: JaxprEqn, params: Mapping[str, Sequence[int]]) -> Value | None:
        starts, ends = params["start_indices"], params["limit_indices"]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        value = self._value(equation.invars[0])
        if isinstance(value, tuple):
            return value[starts[0] : ends[0]]
        return value.cut(starts, sizes) if isinstance(value, View) else value

    def dynamic_slice(
        self, equation: JaxprEqn, params: Mapping[str, Sequence[int]]
    ) -> Value | None:
        value = self._value(equation.invars[0])
        starts = [self._scalar(x) for x in equation.invars[1:]]
        return value.cut(starts, params["slice_sizes"]) if isinstance(value, View) else None

    def gather(self, equation: JaxprEqn, params: Mapping[str, object]) -> Value | None:
        """The reading of one element, at a place for each axis."""
        value, places = (self._value(x) for x in equation.invars)
        if not isinstance(value, View) or type_of(equation.outvars[0]).shape:
            return None
        places = places if isinstance(places, tuple) else (self._scalar(equation.invars[1]),)
        axes = cast("_Dimensions", params["dimension_numbers"]).start_index_map
        if len(axes) != len(value.axes) or value.extents != type_of(equation.invars[0]).shape:
            return None
        starts = [places[axes.index(i)] for i in range(len(axes))]
        element = value.cut(starts, [1] * len(starts))
        return None if element is None else self._filled(element, starts, params)

    def _filled(
        self, view: View, starts: Sequence[Scalar], params: Mapping[str, object]
    ) -> Scalar | None:
        """The element; where JAX fills in a number beyond the ends, that number there."""
        element: Scalar = view.element(self._code)
        if "FILL" not in str(params["mode"]):
            return element
        fill = params["fill_value"]
        other = np.nan if fill is None else float(np.asarray(fill))
        if view.kind != "f":
            return None
        for start, extent in zip(starts, view.extents, strict=True):
            for name, bound in (("ge", 0), ("lt", extent)):
                inside = scalar_operations.of(name, self._code, "p", [start, bound], {})
                assert inside is not None
                element = scalar_operations.select(self._code, "f", inside, element, other)
        return element

    def shaped(self, equation: JaxprEqn, params: Mapping[str, object]) -> Value | None:
        """squeeze, reshape, broadcast_in_dim: the same elements in another shape."""
        value, shape = self._value(equation.invars[0]), type_of(equation.outvars[0]).shape
        if isinstance(value, View):
            part = value.shaped(len(shape))
            if part is not None and not shape:
                return part.element(self._code)
            is_same = type_of(equation.invars[0]).size == type_of(equation.outvars[0]).size
            return part if is_same else None
        elements = value if isinstance(value, tuple) else (value,)
        if shape == ():
            return elements[0]
        return elements if shape == (len(elements),) else None

    def concatenate(self, equation: JaxprEqn, params: Mapping[str, object]) -> Value | None:
        """Places along several axes, as gather takes them."""
        places: list[Scalar] = []
        for x in equation.invars:
            part = self._value(x)
            places += part if isinstance(part, tuple) else (self._scalar(x),)
        return tuple(places)


class _Dimensions(Protocol):
    """What is read of JAX's GatherDimensionNumbers."""

    start_index_map: tuple[int, ...]


_OF_ARRAYS = {
    "slice": _Lowering.slice,
    "dynamic_slice": _Lowering.dynamic_slice,
    "gather": _Lowering.gather,
    "squeeze": _Lowering.shaped,
    "reshape": _Lowering.shaped,
    "broadcast_in_dim": _Lowering.shaped,
    "concatenate": _Lowering.concatenate,
}


def _unknown(name: str) -> Unsupported:
    return Unsupported("operation", f"{name} has no code in these kernels")


def _kind_of(dtype: np.dtype, name: str) -> str:
    kinds = {"float32": "f", "int32": "i", "bool": "p"}
    if dtype.name not in kinds:
        raise Unsupported(
            "dtype", f"{name} in {dtype.name}, where these kernels have float32 and int32"
        )
    return kinds[dtype.name]


def _number(x: np.ndarray) -> Scalar:
    if x.dtype == np.bool_:
        return bool(x)
    return int(x) if np.issubdtype(x.dtype, np.integer) else float(np.float32(x))
