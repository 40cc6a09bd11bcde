"""Straight-line code (programs/scalar_code.py) in NumPy, on arrays of any shape."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _read(array: np.ndarray, index: np.ndarray | int) -> np.ndarray:
    assert array.ndim == 1
    return array[np.clip(index, 0, len(array) - 1)]


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(np.int32)


OPERATIONS: dict[str, object] = {
    "inf": np.inf, "nan": np.nan, "true": True, "false": False,
    "read": _read, "select": np.where,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "max": np.maximum, "min": np.minimum, "neg": np.negative, "abs_": np.abs, "abs_int": np.abs,
    "sign_int": np.sign, "quotient": _quotient,
    "remainder": lambda x, y: x - _quotient(x, y) * y,
    "to_float": lambda x: np.asarray(x, np.float64), "to_int": lambda x: np.asarray(x, np.int32),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and_": np.logical_and, "or_": np.logical_or, "xor_": np.logical_xor,
    "not_": np.logical_not, "and_bits": np.bitwise_and, "or_bits": np.bitwise_or,
    "xor_bits": np.bitwise_xor, "not_bits": np.bitwise_not, "pow_": np.power,
    "tanh": np.tanh, "exp": np.exp, "exp2": np.exp2, "log": np.log, "exact_log": np.log,
    "log1p": np.log1p, "expm1": np.expm1, "sin": np.sin, "cos": np.cos, "erf": _erf,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "ceil": np.ceil, "floor": np.floor,
    "round_even": np.rint,
}  # fmt: skip
"""Every operation of the code. Floats are float64 here."""


def function(code: str, parameters: str) -> Callable[..., np.ndarray]:
    """The code as a function of these parameters, such as "x, b, n, t, s", and of the arrays."""
    count = 1 + max((int(x) for x in re.findall(r"\bo(\d+)\b", code)), default=-1)
    names = "".join(f", o{i}" for i in range(count))
    body = "".join(f"    {x}\n" for x in code.split("; "))
    namespace = dict(OPERATIONS)
    exec(f"def made({parameters}{names}, *others):\n{body}", namespace)
    made = namespace["made"]

    def run(*inputs: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return made(*inputs)  # pyright: ignore

    return run


def forward(code: str, inputs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The changed scores of inputs (x, b, n, t, s)."""
    return function(code, "x, b, n, t, s")(*inputs, *arrays)


def backward(code: str, inputs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The gradient of scores, from inputs (g, x, b, n, t, s); code "" passes g on."""
    return function(code, "g, x, b, n, t, s")(*inputs, *arrays) if code else np.asarray(inputs[0])
