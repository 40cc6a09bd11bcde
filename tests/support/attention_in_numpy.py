"""Attention in float64 NumPy, of scores as they are: what the stand-ins of kernels compute.

Arrays are [..., T, N, H] and [..., S, K, H], scores and weights [..., N, T, S]. A query head reads
key head n // (N // K).
"""

from __future__ import annotations

import numpy as np

Three = tuple[np.ndarray, np.ndarray, np.ndarray]


def repeated(x: np.ndarray, heads: int) -> np.ndarray:
    """Keys or values [..., S, K, H], once for each query head."""
    return x.repeat(heads // x.shape[-2], axis=-2)


def summed(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """The sums [..., S, K, H] over the query heads of each key head."""
    *rows, heads, width = x.shape
    return x.reshape(*rows, kv_heads, heads // kv_heads, width).sum(axis=-2)


def across(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The products of all rows of x [..., T, N, H] and of y [..., S, K, H]."""
    y = repeated(y, x.shape[-2])
    return _product(_swapped(x), _swapped(y).swapaxes(-1, -2))


def applied(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The sums [..., T, N, H] of values [..., S, K, H] by their weights."""
    return _swapped(_product(weights, _swapped(repeated(v, weights.shape[-3]))))


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # infinite padding makes NaN, as in a kernel
        return x @ y


def _swapped(x: np.ndarray) -> np.ndarray:
    """Heads before rows, or after them."""
    return x.swapaxes(-3, -2)


def softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and lse of scores [..., S]; of a row of -inf, 0 and -inf."""
    top = scores.max(axis=-1, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return weights / np.where(total == 0, 1, total)[..., None], lse


def gradients(
    q: np.ndarray, k: np.ndarray, weights: np.ndarray, score_grad: np.ndarray, out_grad: np.ndarray
) -> Three:
    """The gradients of q, k and v, from that of q · k."""
    dk = _swapped(_product(score_grad.swapaxes(-1, -2), _swapped(q)))
    dv = _swapped(_product(weights.swapaxes(-1, -2), _swapped(out_grad)))
    kv_heads = k.shape[-2]
    return applied(score_grad, k), summed(dk, kv_heads), summed(dv, kv_heads)
