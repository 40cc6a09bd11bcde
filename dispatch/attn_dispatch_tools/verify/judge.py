"""How far off a result is, and how far off it may be."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch_tools.verify.naive import Naive
from attn_dispatch_tools.verify.reference import Operands

SLACK = 1e-5
"""What is allowed beside a multiple of the naive computation's error."""

_STATISTICS = ("lse", "row_max")
"""Results in float32 whatever the dtype of the call. Beside the rest they may be off by what a
kernel's fast functions are (some units in the last place of the largest one for exp2 and log2, and
for a soft cap the 2^-11 of the hardware's tanh: PTX ISA, tanh.approx.f32), and by what comes of
adding up a score's products in another order."""

_STATISTICS_ULPS = 4
_TANH_ERROR = 2.0**-11

_DEVIATIONS = 2
"""How many standard deviations off the largest of a few normal errors is."""

_DOUBT = 1e-4
"""By how much the naive computation may be off where everything cancels."""


def with_delta_of(out: np.ndarray, exact: np.ndarray, operands: Operands) -> Operands:
    """The operands of the backward call that a fused one is asked for when it is given this `out`.

    It takes delta, Σ p · dp, as Σ out · dout, so what rounding `out` to 16 bits does to delta it
    must do to every gradient: as much as a gradient of lse that is so much larger would.

        ds = p · (dp - delta + dlse)

    Args:
      out: the implementation's output [B, T, N, V].
      exact: the exact output.
      operands: with out_grad, and lse_grad where the call has it.
    """
    out_grad = operands["out_grad"].astype(np.float64)
    lost = ((exact - out.astype(np.float64)) * out_grad).sum(axis=3).swapaxes(1, 2)  # [B, N, T]
    lost = np.where(np.isfinite(lost), lost, 0)  # of an output that is wrong anyway
    return operands | {"lse_grad": operands.get("lse_grad", np.zeros_like(lost)) + lost}


def of_rounded_rows(
    exact: Operands, given: Operands, rounded: Operands, shape: tuple[int, ...]
) -> np.ndarray:
    """The gradient of a bias that is the same for all keys, from the delta of a rounded output.

    A kernel is not asked for it: it is p_sink · delta + (1 - p_sink) · dlse (core/rewrites).

    Args:
      exact: the reference's results, lse and bias among them.
      given: the operands, with sinks.
      rounded: what `with_delta_of` makes of them.
      shape: of the bias.
    """
    lse = exact["lse"]
    lost = rounded["lse_grad"] - given.get("lse_grad", np.zeros_like(lse))
    above = given["sinks"].astype(np.float64)[:, :, None] - lse
    share = np.where(np.isfinite(lse), np.exp(np.where(np.isfinite(lse), above, 0)), 0)
    moved = (share * lost)[..., None]
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return exact["bias"] - moved.sum(axis=axes, keepdims=True)


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference; infinite where infinities or NaN are not where they belong."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        raise ValueError(f"expected shape {list(expected.shape)}, got {list(got.shape)}")
    finite = np.isfinite(expected)
    if (
        not np.array_equal(got[~finite], expected[~finite], equal_nan=True)
        or not np.isfinite(got[finite]).all()
    ):
        return float("inf")
    return float(np.max(np.abs(got[finite] - expected[finite]), initial=0))


def factor(options: AttentionOptions) -> int:
    """How many times the naive computation's error is allowed."""
    return 2 if options.meaning.logits_soft_cap is None else 3


def allowances(
    options: AttentionOptions,
    expected: Operands,
    plain: Naive,
    names: Iterable[str],
    slack: float = SLACK,
    *,
    is_fused: bool = False,
) -> dict[str, float]:
    """The largest error that each of these results may have, from that of the naive computation.

    Where that is smaller than rounding makes likely, what is likely counts (`Naive.spread`).

    Raises:
      ArithmeticError: if naive computation and reference are so far apart that one must be wrong.
    """
    allowed, spread = {}, plain.spread(is_fused=is_fused)
    for name in names:
        plain_error = error(plain.results[name], expected[name])
        size = np.max(np.abs(expected[name]), initial=0, where=np.isfinite(expected[name]))
        terms = max(size, plain.sizes[name].max(initial=0)) if name in plain.sizes else size
        if not plain_error <= 0.05 * terms + _DOUBT:
            raise ArithmeticError(
                f"the reference's {name} is in doubt: the naive computation is off by "
                f"{plain_error:.3g}, the largest entry is {size:.3g}, "
                f"of terms of {terms:.3g} together"
            )
        # Of few entries, all may by chance be numbers of the result's dtype.
        plain_error = max(plain_error, float(jnp.finfo(plain.results[name].dtype).eps) * size / 2)
        if name in spread:
            plain_error = max(plain_error, _DEVIATIONS * float(spread[name].max(initial=0)))
        allowed[name] = factor(options) * plain_error + slack
        if name in _STATISTICS:
            allowed[name] += _STATISTICS_ULPS * float(np.spacing(np.float32(size)))
            allowed[name] += _TANH_ERROR * (options.meaning.logits_soft_cap or 0)
            allowed[name] += plain.score_noise
    return allowed


def loosened(
    allowed: dict[str, float], expected: Operands, plain: Naive, got: Operands
) -> dict[str, float]:
    """Half as much again where errors are, in the root mean square, at most twice the naive ones.

    The largest of some thousand errors is in part luck, its own and the naive computation's.
    """
    return {
        name: 1.5 * x
        if _rms(got[name], expected[name]) <= 2 * _rms(plain.results[name], expected[name])
        else x
        for name, x in allowed.items()
    }


def _rms(got: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the differences where the expected value is finite."""
    finite = np.isfinite(expected)
    difference = np.asarray(got, np.float64)[finite] - np.asarray(expected, np.float64)[finite]
    return float(np.sqrt(np.mean(difference**2))) if difference.size else 0.0
