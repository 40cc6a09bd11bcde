"""What a kernel cannot be told, or not together: as an array over pairs, which it can.

Such an array costs memory with the product of the lengths, so it is made up to a size only
(`is_affordable`). Bands, those of traced windows too, and sequences become a mask, ALiBi a float32
bias, a mask a bias of 0 and -inf, which is exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    SEQUENCE_OPERANDS,
    Arrays,
    Calls,
    changed,
    common_shape,
    for_,
    is_affordable,
    without_band,
)
from attn_dispatch.programs.program import is_finite
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.semantics.row_ids import is_packed
from attn_dispatch.semantics.sums import sum_like


@dataclass(frozen=True)
class SlopesAsBias:
    name: str = "ALiBi: as a float32 bias"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        if not spec.has("alibi_slopes"):
            return None
        shape = _pairs(spec, "bias", heads=spec.num_heads, batch=spec.shape("alibi_slopes")[0])
        if not is_affordable(shape):
            return None
        wanted = ("bias" if x == "alibi_slopes" else x for x in spec.wanted.gradients)
        return changed(
            spec,
            without=("alibi_slopes",),
            arrays={"bias": (shape, "float32")},
            wanted=replace(spec.wanted, gradients=tuple(dict.fromkeys(wanted))),
        )

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        distance = Positions.of(spec, operands).distance().astype(jnp.float32)
        slopes = operands["alibi_slopes"].astype(jnp.float32)[:, :, None, None]
        bias = operands["bias"].astype(jnp.float32) if spec.has("bias") else 0
        bias = jnp.broadcast_to(bias - slopes * distance, inner.shape("bias"))
        results = calls.kernel(inner, for_(inner, operands | {"bias": bias}))
        if "bias" not in results:
            return results
        grad = results["bias"].astype(jnp.float32)
        if "alibi_slopes" in spec.wanted.gradients:
            shape = spec.shape("alibi_slopes")
            slopes_grad = sum_like(-grad * distance, (*shape, 1, 1)).reshape(shape)
            results["alibi_slopes"] = slopes_grad.astype(spec.dtype_of("alibi_slopes"))
        if spec.has("bias"):
            grad = sum_like(grad, spec.shape("bias"))
            results["bias"] = grad.astype(spec.dtype_of("bias"))
        return results


@dataclass(frozen=True)
class BandAsMask:
    name: str = "causality and window: as a mask"
    # Of a band a kernel may leave out the rows that attend nothing, and count from the next one.
    moves_dropout: bool = True

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        if is_packed(spec) or not (spec.has("window") or spec.band != (None, None)):
            return None
        shape = _pairs(spec, "mask", batch=spec.shape("window")[0] if spec.has("window") else 1)
        if not is_affordable(shape):
            return None
        arrays = {"mask": (shape, "bool")}
        return changed(spec, without=("window",), arrays=arrays, meaning=without_band(spec.meaning))

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        band = replace(Positions.of(spec, operands), query_ids=None, key_ids=None)
        given = operands | {"mask": _mask(spec, operands, band, inner.shape("mask"))}
        if spec.is_backward and spec.has("window"):
            given |= _without_wrong_rows(spec, operands)
        results = calls.kernel(inner, for_(inner, given))
        return results if spec.is_backward else nan_where_invalid(spec, operands, results)


@dataclass(frozen=True)
class SequencesAsMask:
    """Lengths and packed sequences, and the band that counts inside of them.

    A kernel multiplies what a mask hides by 0, and 0 · NaN is NaN. So NaN and infinities are
    replaced by 0, and put back as NaN in the rows that attend them, or are attended by them.
    """

    name: str = "sequences, causality and window: as a mask"
    moves_dropout: bool = True

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        without = tuple(x for x in SEQUENCE_OPERANDS if spec.has(x))
        shape = _pairs(spec, "mask", batch=spec.batch)
        if not without or not is_affordable(shape):
            return None
        if spec.meaning.mods and is_packed(spec):
            return None  # which count positions inside of sequences
        if spec.has("alibi_slopes"):
            with_bias = _SLOPES.inner(spec)
            return None if with_bias is None else self.inner(with_bias)
        return changed(
            spec,
            without=(*without, "window"),
            arrays={"mask": (shape, "bool")},
            meaning=replace(
                without_band(spec.meaning),
                causal_alignment="top_left",
                max_segments=None,
                max_seq_lens=None,
            ),
        )

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        if spec.has("alibi_slopes"):

            def with_mask(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Arrays:
                return self.compute(spec, dict(operands), calls)

            outer = replace(calls, kernel=with_mask)
            return _SLOPES.compute(spec, operands, outer)
        inner = self.inner(spec)
        assert inner is not None
        mask = _mask(spec, operands, Positions.of(spec, operands), inner.shape("mask"))
        clean, bad = _without_nan(spec, operands)
        results = dict(calls.kernel(inner, for_(inner, operands | clean | {"mask": mask})))
        attended = mask & (operands["bias"] > -jnp.inf) if spec.has("bias") else mask
        pairs = attended.any(axis=1)  # [B, T, S]
        of_queries = bad["query"] | (pairs & bad["key"][:, None, :]).any(axis=2)
        of_keys = bad["key"] | (pairs & bad["query"][:, :, None]).any(axis=1)
        # A row that attends nothing has its results, whatever stands there.
        of_queries &= pairs.any(axis=2)
        of_keys &= pairs.any(axis=1)
        spoiled = {
            "out": of_queries[..., None, None],
            "lse": of_queries[:, None, :],
            "row_max": of_queries[:, None, :],
            "query": of_queries[..., None, None],
            "key": of_keys[..., None, None],
            "value": of_keys[..., None, None],
        }
        for name, is_spoiled in spoiled.items():
            if name in results:
                results[name] = jnp.where(is_spoiled, jnp.nan, results[name])
        return results if spec.is_backward else nan_where_invalid(spec, operands, results)


@dataclass(frozen=True)
class MaskAsBias:
    name: str = "the mask: as a bias of 0 and -inf"
    moves_dropout: bool = False

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        if not spec.has("mask") or not is_finite(spec.meaning.score_mod):
            return None  # NaN - inf is NaN
        shape = common_shape(*(spec.shape(x) for x in ("mask", "bias") if spec.has(x)))
        dtype = spec.dtype_of("bias") if spec.has("bias") else spec.dtype
        return changed(spec, without=("mask",), arrays={"bias": (shape, dtype)})

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        inner = self.inner(spec)
        assert inner is not None
        bias = operands["bias"] if spec.has("bias") else jnp.zeros((), inner.dtype_of("bias"))
        bias = jnp.where(operands["mask"], bias, -jnp.inf)
        results = dict(calls.kernel(inner, for_(inner, operands | {"bias": bias})))
        if "bias" in spec.wanted.gradients:
            grad = sum_like(results["bias"], spec.shape("bias"))
            results["bias"] = grad.astype(spec.dtype_of("bias"))
        return results


_SLOPES = SlopesAsBias()


def _pairs(
    spec: AttentionSpec, name: str, *, batch: int = 1, heads: int = 1
) -> tuple[int, int, int, int]:
    """The shape [·, ·, T, S] of what comes of the operand `name` and of positions."""
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    has_lengths = spec.has("query_seq_lengths") or spec.has("key_value_seq_lengths")
    if is_packed(spec) or (has_lengths and is_bottom_right):
        batch = spec.batch
    if spec.has(name):
        own_batch, own_heads = spec.shape(name)[:2]
        batch, heads = max(batch, own_batch), max(heads, own_heads)
    return batch, heads, spec.seq_len_q, spec.seq_len_kv


def _mask(
    spec: AttentionSpec, operands: Arrays, positions: Positions, shape: tuple[int, ...]
) -> jax.Array:
    may_attend = allowed(
        changed(spec, meaning=replace(spec.meaning, mask_mod=None)), operands, positions
    )
    assert may_attend is not None
    return jnp.broadcast_to(may_attend, shape)


def _without_wrong_rows(spec: AttentionSpec, operands: Arrays) -> Arrays:
    """The arrays with 0 in batch rows whose window is wrong: no gradient goes through those."""
    wrong = (operands["window"] < 0).any(axis=1)[:, None, None, None]
    arrays = ("query", "key", "value", "out", "out_grad")
    return {name: jnp.where(wrong, 0, operands[name]) for name in arrays}


def _without_nan(spec: AttentionSpec, operands: Arrays) -> tuple[Arrays, Arrays]:
    """The operands with 0 in rows that are not finite or are padding, and which were not finite.

    The latter as bool [B, T] of "query" and [B, S] of "key".
    """
    positions = Positions.of(spec, operands)
    assert positions.query_ids is not None and positions.key_ids is not None
    live = {"query": positions.query_ids > 0, "key": positions.key_ids > 0}
    sides = {"query": ("query", "out", "out_grad"), "key": ("key", "value")}
    clean: Arrays = {}
    bad: Arrays = {}
    for side, names in sides.items():
        there = [name for name in names if spec.has(name)]
        is_finite = [jnp.isfinite(operands[name]).all(axis=(2, 3)) for name in there]
        if side == "query" and spec.has("lse"):
            is_finite.append(~jnp.isnan(operands["lse"]).any(axis=1))
        bad[side] = ~jnp.stack(is_finite).all(axis=0)
        keep = live[side] & ~bad[side]
        clean |= {name: jnp.where(keep[..., None, None], operands[name], 0) for name in there}
        if side == "query" and spec.has("lse"):
            clean["lse"] = jnp.where(keep[:, None, :], operands["lse"], -jnp.inf)
        if side == "query" and spec.has("lse_grad"):
            clean["lse_grad"] = jnp.where(keep[:, None, :], operands["lse_grad"], 0)
    return clean, bad
