"""How far off a result is, and how far off it may be."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from attn_dispatch.conformance.reference import Operands
from attn_dispatch.spec import AttentionOptions

SLACK = 1e-5
"""What is allowed beside a multiple of the naive computation's error."""

_DOUBT = 1e-4
"""By how much the naive computation may be off where everything cancels."""


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference; infinite where infinities or NaN are not where they belong."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        raise ValueError(f"expected shape {list(expected.shape)}, got {list(got.shape)}")
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite]) or not np.isfinite(got[finite]).all():
        return float("inf")
    return float(np.max(np.abs(got[finite] - expected[finite]), initial=0))


def factor(options: AttentionOptions) -> int:
    """How many times the naive computation's error is allowed."""
    return 2 if options.logits_soft_cap is None else 3


def allowances(
    options: AttentionOptions,
    expected: Operands,
    plain: Operands,
    names: Iterable[str],
    slack: float = SLACK,
) -> dict[str, float]:
    """The largest error that each of these results may have, from that of the naive computation.

    Raises:
      ArithmeticError: if naive computation and reference are so far apart that one must be wrong.
    """
    allowed = {}
    for name in names:
        plain_error = error(plain[name], expected[name])
        size = np.max(np.abs(expected[name]), initial=0, where=np.isfinite(expected[name]))
        if not plain_error <= 0.05 * size + _DOUBT:
            raise ArithmeticError(
                f"the reference's {name} is in doubt: the naive computation is off by "
                f"{plain_error:.3g}, the largest entry is {size:.3g}"
            )
        allowed[name] = factor(options) * plain_error + slack
    return allowed
