"""cuDNN's nodes of a score_mod in float64 NumPy: score_program.h, written out."""

from __future__ import annotations

from typing import Any

import numpy as np

_OPERATIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum,
    "min": np.minimum, "pow": np.power, "neg": np.negative, "abs": np.abs, "exp": np.exp,
    "log": np.log, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "sqrt": np.sqrt, "ceil": np.ceil, "floor": np.floor, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: 1 / x, "select": lambda x, y, p: np.where(p, x, y),
    "convert": lambda x: x.astype(np.float64),
}  # fmt: skip
_WORDS = ("x", "g", "t", "s", "f", "i", "p")


def run(nodes: str, known: dict[str, Any]) -> np.ndarray:
    """The last node's result. `known` has x, t, s and o0, o1, …, and is given all results."""
    result = known.get("x")
    with np.errstate(all="ignore"):
        for node in filter(None, nodes.split("; ")):
            name, equals, operation, *words = node.split()
            assert equals == "=" and words[0][0] in _WORDS, node
            operands = [_value(word, known) for word in words]
            result = known[name] = _OPERATIONS[operation](*operands)
            wanted = {"f": np.floating, "i": np.integer, "p": np.bool_}[name[0]]
            assert np.issubdtype(result.dtype, wanted), (node, result.dtype)
    return result


def _value(word: str, known: dict[str, Any]) -> Any:
    if not word.startswith("#"):
        return known[word]
    number = word[1:]
    return float(number) if any(x in number for x in ".enf") else int(number)
