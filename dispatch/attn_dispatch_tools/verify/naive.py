"""Attention in the plainest way, with every array dense, in NumPy.

Errors of implementations are compared with its error against `reference`. It computes in float32,
but for 16-bit calls the operands of matrix products are rounded to 16 bits, as for matrix units:
the probabilities and their gradient, and the gradient of the scores. Each query head's part of a kv
head's gradient is rounded before the parts are added up.

It is NumPy because JAX would compile a program for every shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.operands import mod_operands
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.programs.program import ModProgram
from attn_dispatch_tools.verify.drawn_mods import EXACT, FAST, DrawnScoreMod, Places
from attn_dispatch_tools.verify.reference import (
    Operands,
    allowed,
    arrays_of,
    mark_invalid,
    places_of,
    poison_padding,
    relative_positions,
    segment_ids,
    with_row_offset,
)

_FLOAT32_NOISE = 2.0**-21
"""The error of a sum of products by a matrix unit, in units of the root of the sum of squares.
Matrix units add in fewer bits than processors; an H100's error was about 2^-21.5 (cuDNN 9.19)."""


@dataclass(frozen=True)
class Naive:
    """The results by name, and the errors that rounding alone causes."""

    results: Operands
    sizes: Operands
    """For gradients, the sum of the sizes of their terms: if terms cancel, the size of the gradient
    itself does not bound its error."""
    score_noise: float
    """The error of the largest score if its products are added up in another order."""
    _spread: Callable[[bool], Operands]

    def spread(self, *, is_fused: bool) -> Operands:
        """Standard deviations of the results, from rounding probabilities, the gradient of scores,
        and each sum to 16 bits. The actual error of the naive computation may by chance be smaller.

        A fused backward pass computes p · (dp - delta) from two sums that a matrix unit and a
        reduction round differently, so terms that should cancel to 0 do not.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self._spread(is_fused)


def naive(options: AttentionOptions, operands: Operands, keep: np.ndarray | None = None) -> Naive:
    """The results of `reference`, computed in the dtype of the operands.

    Without out_grad among the operands the gradients are left out.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        call = _Forward(options, poison_padding(options, operands, 0.0), keep)
        results = {"out": call.out.swapaxes(1, 2), "lse": call.lse}
        if options.wanted.needs_max:
            results["row_max"] = call.row_max
        results = {name: np.array(x) for name, x in results.items()}
        mark_invalid(options, operands, results)
        out_spread = {"out": _out_spread(call)}
        if "out_grad" not in operands:
            return Naive(results, {}, call.score_noise, lambda is_fused: out_spread)
        gradients, narrow = _gradients(call)
        rounding = {
            x: _rounding_variance(gradients[x].astype(call.wide), gradients[x].dtype)
            for x in ("query", "key", "value")
        }

        def spread(is_fused: bool) -> Operands:
            return out_spread | _spread(call, narrow, rounding, is_fused)

        return Naive(results | gradients, _sizes(call), call.score_noise, spread)


class _Forward:
    """The forward pass, [B, N, T, ·] and [B, N, S, ·], and the values that its gradients need."""

    def __init__(
        self, options: AttentionOptions, operands: Operands, keep: np.ndarray | None
    ) -> None:
        self.options, self.operands = options, operands
        self.dtype = operands["query"].dtype
        self.wide = np.promote_types(self.dtype, np.float32)
        self.kv_heads = operands["key"].shape[2]
        self.groups = operands["query"].shape[2] // self.kv_heads
        self.q = self.heads_first("query")
        self.k, self.v = (self.heads_first(x).repeat(self.groups, axis=1) for x in ("key", "value"))
        score = self.wide.type(options.meaning.scale) * (self.q @ self.k.swapaxes(2, 3))
        sizes = np.abs(self.q) @ np.abs(self.k).swapaxes(2, 3)
        unit = float(np.finfo(self.wide).eps * np.sqrt(max(self.q.shape[3], 1)))
        self.score_noise = unit * abs(options.meaning.scale) * float(sizes.max(initial=0))
        self.slope = np.ones((1, 1, 1, 1), self.wide)
        if options.meaning.logits_soft_cap is not None:
            bent = np.tanh(score / self.wide.type(options.meaning.logits_soft_cap))
            score, self.slope = self.wide.type(options.meaning.logits_soft_cap) * bent, 1 - bent**2
        self.by_read: dict[str, np.ndarray] = {}
        may_attend = allowed(options, operands)
        if options.meaning.score_mod is not None:
            score = self._modified(options.meaning.score_mod, score, may_attend)
        self.distance = np.ones((1, 1, 1, 1), self.wide)
        if "alibi_slopes" in operands:
            rows = range(self.q.shape[0])
            distance = [
                abs(
                    relative_positions(
                        with_row_offset(options, operands, row),
                        *segment_ids(options, operands, row),
                    )
                )
                for row in rows
            ]
            self.distance = np.array(distance, self.wide)[:, None]
            score = score - self.per_head("alibi_slopes")[..., None] * self.distance
        if "bias" in operands:
            score = score + operands["bias"].astype(self.wide)
        score = np.where(may_attend, score, -np.inf)
        self.row_max = score.max(axis=3, initial=-np.inf)
        self.attends = self.row_max != -np.inf
        sinks = self.per_head("sinks") if "sinks" in operands else np.full((1, 1, 1), -np.inf)
        top = np.where(self.attends, np.maximum(self.row_max, sinks), 0).astype(self.wide)
        total = np.exp(score - top[..., None]).sum(axis=3) + np.exp(sinks - top)
        lse = top + np.log(np.where(self.attends, total, 1))
        self.p = np.exp(score - lse[..., None]).astype(self.wide)
        self.p_sink = np.where(self.attends, np.exp(sinks - lse), 0).astype(self.wide)
        self.lse = np.where(self.attends, lse, -np.inf)
        self.kept = np.ones((1, 1, 1, 1), self.wide)
        if keep is not None:
            self.kept = (keep / (1 - options.meaning.dropout_rate)).astype(self.wide)
        self.p_kept = self.rounded(self.p * self.kept)
        self.out = (self.p_kept @ self.v).astype(self.dtype)

    def heads_first(self, name: str) -> np.ndarray:
        return self.operands[name].astype(self.wide).swapaxes(1, 2)

    def _modified(
        self, score_mod: ModProgram, score: np.ndarray, may_attend: np.ndarray
    ) -> np.ndarray:
        """The scores after a score_mod; in 16 bits with the error of the hardware's tanh."""
        assert isinstance(score_mod, DrawnScoreMod)
        batch = range(self.q.shape[0])
        self.places = Places.together(
            [places_of(self.options, self.operands, row) for row in batch]
        )
        functions = FAST if self.dtype.itemsize == 2 else EXACT
        score, slope, self.by_read = score_mod.modified(
            score, may_attend, self.places, arrays_of("score_mod", self.operands), functions
        )
        self.slope = self.slope * slope
        self.score_noise *= max(1.0, float(np.abs(slope).max(initial=0)))
        return score

    def per_read_array(self, weights: np.ndarray, function: Callable[..., np.ndarray]) -> Operands:
        """For each array that score_mod reads, by name: the sum over pairs of weights times a
        function of the score's derivative by the array."""
        names = mod_operands("score_mod", len(self.by_read))
        return {
            name: self.places.summed(index, weights * function(slope), self.operands[name].shape)
            for name, (index, slope) in zip(names, self.by_read.items(), strict=True)
        }

    @cached_property
    def p_grad(self) -> np.ndarray:
        """The gradient of the probabilities that were kept."""
        return self.heads_first("out_grad") @ self.v.swapaxes(2, 3)

    def per_head(self, name: str) -> np.ndarray:
        """[1|B, N] as [1|B, N, 1]."""
        return self.operands[name].astype(self.wide)[..., None]

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """x rounded to the call's dtype."""
        return x.astype(self.dtype).astype(self.wide)

    def sum_groups(self, x: np.ndarray) -> np.ndarray:
        """[B, N, S, ·] to [B, S, K, ·]."""
        b, _, s, dim = x.shape
        return x.reshape(b, self.kv_heads, self.groups, s, dim).sum(axis=2).swapaxes(1, 2)


def _gradients(call: _Forward) -> tuple[Operands, np.ndarray]:
    """The gradients, and the gradient of the scores in the call's dtype."""
    operands, scale = call.operands, call.wide.type(call.options.meaning.scale)
    out_grad = call.heads_first("out_grad")
    p_grad = call.rounded(call.p_grad) * call.kept
    mean = (call.p * p_grad).sum(axis=3)
    lse_grad = np.asarray(operands.get("lse_grad", np.zeros_like(mean)), call.wide)
    score_grad = call.p * (p_grad - mean[..., None] + lse_grad[..., None])
    narrow = call.rounded(score_grad)
    raw_grad = narrow * call.slope
    key_grad = scale * (raw_grad.swapaxes(2, 3) @ call.q)
    value_grad = call.p_kept.swapaxes(2, 3) @ out_grad
    found = {
        "query": (scale * (raw_grad @ call.k)).swapaxes(1, 2),
        "key": call.sum_groups(call.rounded(key_grad)),
        "value": call.sum_groups(call.rounded(value_grad)),
        # A bias' gradient consists of gradients of scores, rounded to 16 bits as in matrix
        # products. If all keys share the bias, these cancel exactly when summed, but not after
        # rounding.
        "bias": score_grad if _is_same_for_all_keys(call) else narrow,
        "alibi_slopes": -(narrow * call.distance).sum(axis=(2, 3)),
        "sinks": np.where(call.attends, call.p_sink * (lse_grad - mean), 0).sum(axis=2),
    }
    found |= call.per_read_array(narrow, np.positive)
    gradients = {
        name: _sum_like(x, operands[name].shape).astype(operands[name].dtype)
        for name, x in found.items()
        if name in operands
    }
    return gradients, narrow


def _sizes(call: _Forward) -> Operands:
    """The sizes of `Naive`."""
    operands, scale = call.operands, abs(call.options.meaning.scale)
    p_grad = np.abs(call.p_grad) * call.kept
    row = (call.p * p_grad).sum(axis=3) + np.abs(operands.get("lse_grad", 0))
    score_size = call.p * (p_grad + row[..., None])
    raw_size = score_size * np.abs(call.slope)
    out_grad = np.abs(call.heads_first("out_grad"))
    found = {
        "query": (scale * (raw_size @ np.abs(call.k))).swapaxes(1, 2),
        "key": call.sum_groups(scale * (raw_size.swapaxes(2, 3) @ np.abs(call.q))),
        "value": call.sum_groups(call.p_kept.swapaxes(2, 3) @ out_grad),
        "bias": score_size,
        "alibi_slopes": (score_size * call.distance).sum(axis=(2, 3)),
        "sinks": np.where(call.attends, call.p_sink * row, 0).sum(axis=2),
    }
    found |= call.per_read_array(score_size, np.abs)
    return {
        name: _sum_like(size, operands[name].shape)
        for name, size in found.items()
        if name in operands
    }


def _is_same_for_all_keys(call: _Forward) -> bool:
    bias = call.operands.get("bias")
    return bias is not None and bias.shape[3] == 1 and call.k.shape[2] > 1


def _out_spread(call: _Forward) -> np.ndarray:
    """The spread of `out`. A kernel may round the probabilities before it divides by their sum."""
    p_variance = _rounding_variance(call.p_kept, call.dtype)
    out_variance = _rounding_variance(call.out.astype(call.wide), call.dtype)
    return np.sqrt(p_variance @ call.v**2 + out_variance).swapaxes(1, 2)


def _spread(call: _Forward, narrow: np.ndarray, rounding: Operands, is_fused: bool) -> Operands:
    """The spread of the gradients: the variances of rounded numbers, propagated to each."""
    operands, scale = call.operands, call.options.meaning.scale
    out_grad = call.heads_first("out_grad")
    p_grad = call.p_grad * call.kept
    mean = (call.p * p_grad).sum(axis=3, keepdims=True)
    # p · (dp - delta) is 0 where a row has one key, but not once float32 has rounded p and delta.
    float32_variance = (np.finfo(np.float32).eps * call.p) ** 2 * (p_grad**2 + mean**2)
    score_variance = _rounding_variance(narrow, call.dtype)
    if is_fused and scale:
        # Kernels may round the gradient of the scores after multiplying it by the scale.
        rounded = _rounding_variance(narrow * call.wide.type(scale), call.dtype) / scale**2
        score_variance = np.maximum(score_variance, rounded)
    score_variance = score_variance + float32_variance
    p_variance = _rounding_variance(call.p_kept, call.dtype)
    delta_variance = np.zeros((1, 1, 1, 1), call.wide)
    if is_fused:
        squared_products = (out_grad**2 @ (call.v**2).swapaxes(2, 3)) * call.kept**2
        delta_variance = ((call.out.astype(call.wide) * out_grad) ** 2).sum(axis=3, keepdims=True)
        delta_variance = _FLOAT32_NOISE**2 * delta_variance
        score_variance = score_variance + call.p**2 * (
            _FLOAT32_NOISE**2 * squared_products + delta_variance
        )
    raw_variance = score_variance * call.slope**2
    row = delta_variance * ((call.p * call.slope) @ call.k) ** 2
    found = {
        "query": (scale**2 * (raw_variance @ call.k**2 + row)).swapaxes(1, 2),
        "key": call.sum_groups(scale**2 * (raw_variance.swapaxes(2, 3) @ call.q**2)),
        "value": call.sum_groups(p_variance.swapaxes(2, 3) @ out_grad**2),
        "bias": score_variance,
        "alibi_slopes": (score_variance * call.distance**2).sum(axis=(2, 3)),
        "sinks": (call.p_sink**2 * delta_variance[..., 0]).sum(axis=2),
    }
    found |= call.per_read_array(score_variance, np.square)
    return {
        name: np.sqrt(_sum_like(variance, operands[name].shape) + rounding.get(name, 0))
        for name, variance in found.items()
        if name in operands
    }


def _rounding_variance(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The variance of rounding to this dtype, uniform within a unit in the last place."""
    if dtype.itemsize > 2:
        return np.zeros_like(x)
    unit = float(jnp.finfo(dtype).eps) * 2.0 ** np.frexp(x)[1] / 2
    return np.where(x == 0, 0, unit**2 / 12).astype(x.dtype)


def _sum_like(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """x summed over the axes that have length 1 in `shape`."""
    axes = tuple(i for i, m in enumerate(shape) if m == 1 and x.shape[i] > 1)
    return x.sum(axis=axes, keepdims=True) if axes else x
