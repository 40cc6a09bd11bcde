"""The errors of results, and the errors that are allowed."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch_tools.verify.naive import Naive
from attn_dispatch_tools.verify.reference import Operands

SLACK = 1e-5
"""The error that is allowed beside a multiple of the naive computation's error."""

_STATISTICS = ("lse", "row_max")
"""Results in float32 whatever the dtype of the call. They may also have the errors of a kernel's
fast functions (for exp2 and log2 some units in the last place of the largest one; for a soft cap
the 2^-11 of the hardware's tanh: PTX ISA, tanh.approx.f32), and of another order of summation."""

_STATISTICS_ULPS = 4
_TANH_ERROR = 2.0**-11

_DEVIATIONS = 2
"""The size of the largest of a few normally distributed errors, in standard deviations."""

_DOUBT = 1e-4
"""The error that the naive computation may have where all terms cancel."""


def with_rounded_delta(out: np.ndarray, exact: np.ndarray, operands: Operands) -> Operands:
    """The operands with an lse_grad that has the effect of a rounded `out` in a backward pass.

    A fused pass computes delta, Σ p · dp, as Σ out · dout. So rounding `out` to 16 bits changes
    delta, and with it every gradient, just as a larger gradient of lse would.

        ds = p · (dp - delta + dlse)

    Args:
      out: the implementation's output [B, T, N, V].
      exact: the exact output.
      operands: with out_grad, and lse_grad where the call has it.
    """
    out_grad = operands["out_grad"].astype(np.float64)
    lost = ((exact - out.astype(np.float64)) * out_grad).sum(axis=3).swapaxes(1, 2)  # [B, N, T]
    lost = np.where(np.isfinite(lost), lost, 0)  # an output that is not finite is wrong anyway
    return operands | {"lse_grad": operands.get("lse_grad", np.zeros_like(lost)) + lost}


def row_bias_gradient(
    exact: Operands, given: Operands, rounded: Operands, shape: tuple[int, ...]
) -> np.ndarray:
    """The gradient of a bias that is the same for all keys, with delta from a rounded output.

    A rewrite computes it, not a kernel: p_sink · delta + (1 - p_sink) · dlse.

    Args:
      exact: the reference's results, lse and bias among them.
      given: the operands, with sinks.
      rounded: the operands that `with_rounded_delta` returns.
      shape: the shape of the bias.
    """
    lse = exact["lse"]
    lost = rounded["lse_grad"] - given.get("lse_grad", np.zeros_like(lse))
    above = given["sinks"].astype(np.float64)[:, :, None] - lse
    share = np.where(np.isfinite(lse), np.exp(np.where(np.isfinite(lse), above, 0)), 0)
    moved = (share * lost)[..., None]
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return exact["bias"] - moved.sum(axis=axes, keepdims=True)


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference; infinite if infinities or NaN are at other places."""
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
    """The factor by which an error may exceed that of the naive computation."""
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
    """The largest allowed error of each of these results, from that of the naive computation.

    If the naive error is by chance smaller than rounding makes likely, the likely error counts
    (`Naive.spread`).

    Raises:
      ArithmeticError: naive computation and reference differ so much that one must be wrong.
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
        # By chance, all entries of a small array may be exact in the result's dtype.
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
    """The allowed errors times 1.5 where the root mean square error is at most twice the naive one.

    The largest of some thousand errors, of either computation, depends in part on chance.
    """
    return {
        name: 1.5 * x
        if _rms(got[name], expected[name]) <= 2 * _rms(plain.results[name], expected[name])
        else x
        for name, x in allowed.items()
    }


def _rms(got: np.ndarray, expected: np.ndarray) -> float:
    """The root mean square of the differences where the expected value is finite."""
    finite = np.isfinite(expected)
    difference = np.asarray(got, np.float64)[finite] - np.asarray(expected, np.float64)[finite]
    return float(np.sqrt(np.mean(difference**2))) if difference.size else 0.0
