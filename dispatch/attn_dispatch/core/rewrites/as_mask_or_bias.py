"""Options that a kernel does not support, or not together, replaced by a mask or a bias.

A band, including that of a traced window, and sequences become a mask. ALiBi becomes a float32
bias. A mask becomes a bias of 0 and -inf, which is exact in every dtype. Such an array takes memory
in proportion to the product of the lengths, so its size is limited (MAX_PAIR_ENTRIES).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    SEQUENCE_OPERANDS,
    SEQUENCES,
    AskedOf,
    Calls,
    NamedArrays,
    Rewrite,
    Shape,
    changed,
    common_shape,
    for_,
    without_band,
    without_offset,
)
from attn_dispatch.programs.program import is_finite
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.semantics.sums import sum_like


def _bias_shape(spec: AttentionSpec) -> Shape:
    return _pairs(spec, "bias", heads=spec.num_heads, batch=spec.shape("alibi_slopes")[0])


def _slopes_as_bias(spec: AttentionSpec) -> AttentionSpec:
    wanted = ("bias" if x == "alibi_slopes" else x for x in spec.wanted.gradients)
    inner = changed(
        spec,
        without=("alibi_slopes",),
        arrays={"bias": (_bias_shape(spec), "float32")},
        wanted=replace(spec.wanted, gradients=tuple(dict.fromkeys(wanted))),
    )
    return without_offset(inner)


def _compute_slopes(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    distance = Positions.of(spec, operands).distance().astype(jnp.float32)
    slopes = operands["alibi_slopes"].astype(jnp.float32)[:, :, None, None]
    bias = operands["bias"].astype(jnp.float32) if spec.has("bias") else 0
    bias = jnp.broadcast_to(bias - slopes * distance, inner.shape("bias"))
    results = calls.kernel(for_(inner, operands | {"bias": bias}))
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


SLOPES_AS_BIAS = Rewrite(
    "ALiBi: as a float32 bias",
    _slopes_as_bias,
    _compute_slopes,
    asked_of=AskedOf(("alibi_slopes",)),
    adds=("bias",),
    pairs=lambda spec: (_bias_shape(spec),),
)


def _after_slopes(
    compute: Callable[[AttentionSpec, AttentionSpec, NamedArrays, Calls], NamedArrays],
    spec: AttentionSpec,
    inner: AttentionSpec,
    operands: NamedArrays,
    calls: Calls,
) -> NamedArrays:
    """The results of the call, where `compute` leads to the inner call once ALiBi is a bias."""
    with_bias = _slopes_as_bias(spec)

    def kernel(operands: Mapping[str, jax.Array]) -> NamedArrays:
        return compute(with_bias, inner, dict(operands), calls)

    return _compute_slopes(spec, with_bias, operands, Calls(kernel, calls.xla, calls.beside))


def _band_shape(spec: AttentionSpec) -> Shape:
    return _pairs(spec, "mask", batch=spec.shape("window")[0] if spec.has("window") else 1)


def _band_as_mask(spec: AttentionSpec) -> AttentionSpec:
    if _has_slopes_by_offset(spec):
        return _band_as_mask(_slopes_as_bias(spec))
    arrays = {"mask": (_band_shape(spec), "bool")}
    return without_offset(
        changed(spec, without=("window",), arrays=arrays, meaning=without_band(spec.meaning))
    )


def _has_slopes_by_offset(spec: AttentionSpec) -> bool:
    """Whether ALiBi, too, counts from an offset, which no kernel with a band has."""
    return spec.has("alibi_slopes") and spec.meaning.causal_alignment == "by_offset"


def _band_arrays(spec: AttentionSpec) -> tuple[Shape, ...]:
    band = _band_shape(spec)
    return (band, _bias_shape(spec)) if _has_slopes_by_offset(spec) else (band,)


def _compute_band(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    if _has_slopes_by_offset(spec):
        return _after_slopes(_compute_band, spec, inner, operands, calls)
    band = replace(Positions.of(spec, operands), query_ids=None, key_ids=None)
    given = operands | {"mask": _mask(spec, operands, band, inner.shape("mask"))}
    if spec.is_backward and spec.has("window"):
        given |= _without_wrong_rows(spec, operands)
    results = calls.kernel(for_(inner, given))
    return results if spec.is_backward else nan_where_invalid(spec, operands, results)


BAND_AS_MASK = Rewrite(
    "causality and window: as a mask",
    _band_as_mask,
    _compute_band,
    adds=("mask", "bias"),
    when=lambda spec: not spec.is_packed and (spec.has("window") or spec.band != (None, None)),
    pairs=_band_arrays,
    # For a band a kernel may skip rows that attend nothing, and draw their mask for the next rows.
    moves_dropout=True,
    needed_for="alibi/lengths_bottom_right_bf16_d64_256x256",
)


def _sequence_arrays(spec: AttentionSpec) -> tuple[Shape, ...]:
    mask = _pairs(spec, "mask", batch=spec.batch)
    return (mask, _bias_shape(spec)) if spec.has("alibi_slopes") else (mask,)


def _sequences_as_mask(spec: AttentionSpec) -> AttentionSpec:
    if spec.has("alibi_slopes"):
        return _sequences_as_mask(_slopes_as_bias(spec))
    return changed(
        spec,
        without=(*(x for x in SEQUENCE_OPERANDS if spec.has(x)), "window", "causal_offset"),
        arrays={"mask": (_pairs(spec, "mask", batch=spec.batch), "bool")},
        meaning=replace(
            without_band(spec.meaning),
            causal_alignment="top_left",
            causal_offset=0,
            max_segments=None,
            max_seq_lens=None,
        ),
    )


def _compute_sequences(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    """The results of the call, by the kernel's call with a mask in which the band counts positions
    within each sequence.

    A kernel multiplies what a mask hides by 0, and 0 · NaN is NaN. So rows with NaN or infinities
    are replaced by 0, and the results are set to NaN in rows that attend to such a row, or that
    such a row attends to.
    """
    if spec.has("alibi_slopes"):
        return _after_slopes(_compute_sequences, spec, inner, operands, calls)
    mask = _mask(spec, operands, Positions.of(spec, operands), inner.shape("mask"))
    cleared, bad = _without_nan(spec, operands)
    results = dict(calls.kernel(for_(inner, operands | cleared | {"mask": mask})))
    attended = mask & (operands["bias"] > -jnp.inf) if spec.has("bias") else mask
    pairs = attended.any(axis=1)  # [B, T, S]
    of_queries = bad["query"] | (pairs & bad["key"][:, None, :]).any(axis=2)
    of_keys = bad["key"] | (pairs & bad["query"][:, :, None]).any(axis=1)
    # A row that attends nothing keeps its results, whatever values it holds.
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


SEQUENCES_AS_MASK = Rewrite(
    "sequences, causality and window: as a mask",
    _sequences_as_mask,
    _compute_sequences,
    asked_of=SEQUENCES,
    adds=("mask", "bias"),
    # In packed sequences a mod counts positions within each sequence.
    when=lambda spec: not (spec.meaning.mods and spec.is_packed),
    pairs=_sequence_arrays,
    moves_dropout=True,
)


def _mask_as_bias(spec: AttentionSpec) -> AttentionSpec:
    shape = common_shape(*(spec.shape(x) for x in ("mask", "bias") if spec.has(x)))
    dtype = spec.dtype_of("bias") if spec.has("bias") else spec.dtype
    return changed(spec, without=("mask",), arrays={"bias": (shape, dtype)})


def _compute_mask(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    bias = operands["bias"] if spec.has("bias") else jnp.zeros((), inner.dtype_of("bias"))
    bias = jnp.where(operands["mask"], bias, -jnp.inf)
    results = dict(calls.kernel(for_(inner, operands | {"bias": bias})))
    if "bias" in spec.wanted.gradients:
        grad = sum_like(results["bias"], spec.shape("bias"))
        results["bias"] = grad.astype(spec.dtype_of("bias"))
    return results


MASK_AS_BIAS = Rewrite(
    "the mask: as a bias of 0 and -inf",
    _mask_as_bias,
    _compute_mask,
    asked_of=AskedOf(("mask",)),
    adds=("bias",),
    # NaN - inf is NaN.
    when=lambda spec: is_finite(spec.meaning.score_mod),
)


def _pairs(
    spec: AttentionSpec, name: str, *, batch: int = 1, heads: int = 1
) -> tuple[int, int, int, int]:
    """The shape [·, ·, T, S] of an array made from the positions and, if there is one, from the
    operand `name`. `batch` and `heads` are the sizes that other operands of it require."""
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    if spec.is_packed or (spec.has_lengths and is_bottom_right):
        batch = spec.batch
    if spec.has("causal_offset"):
        batch = max(batch, spec.shape("causal_offset")[0])
    if spec.has(name):
        own_batch, own_heads = spec.shape(name)[:2]
        batch, heads = max(batch, own_batch), max(heads, own_heads)
    return batch, heads, spec.seq_len_q, spec.seq_len_kv


def _mask(
    spec: AttentionSpec, operands: NamedArrays, positions: Positions, shape: tuple[int, ...]
) -> jax.Array:
    without_mod = changed(spec, meaning=replace(spec.meaning, mask_mod=None))
    may_attend = allowed(without_mod, operands, positions)
    assert may_attend is not None
    return jnp.broadcast_to(may_attend, shape)


def _without_wrong_rows(spec: AttentionSpec, operands: NamedArrays) -> NamedArrays:
    """The arrays with 0 in batch rows whose window is invalid, so that no gradient passes there."""
    wrong = (operands["window"] < 0).any(axis=1)[:, None, None, None]
    arrays = ("query", "key", "value", "out", "out_grad")
    return {name: jnp.where(wrong, 0, operands[name]) for name in arrays}


def _without_nan(spec: AttentionSpec, operands: NamedArrays) -> tuple[NamedArrays, NamedArrays]:
    """The operands with 0 in padding rows and in bad rows, and which rows are bad.

    A row is bad if it holds NaN or an infinity: bool [B, T] as "query" and [B, S] as "key".
    """
    positions = Positions.of(spec, operands)
    assert positions.query_ids is not None and positions.key_ids is not None
    live = {"query": positions.query_ids > 0, "key": positions.key_ids > 0}
    sides = {"query": ("query", "out", "out_grad"), "key": ("key", "value")}
    cleared: NamedArrays = {}
    bad: NamedArrays = {}
    for side, names in sides.items():
        there = [name for name in names if spec.has(name)]
        is_finite = [jnp.isfinite(operands[name]).all(axis=(2, 3)) for name in there]
        if side == "query" and spec.has("lse"):
            is_finite.append(~jnp.isnan(operands["lse"]).any(axis=1))
        bad[side] = ~jnp.stack(is_finite).all(axis=0)
        keep = live[side] & ~bad[side]
        cleared |= {name: jnp.where(keep[..., None, None], operands[name], 0) for name in there}
        if side == "query" and spec.has("lse"):
            cleared["lse"] = jnp.where(keep[:, None, :], operands["lse"], -jnp.inf)
        if side == "query" and spec.has("lse_grad"):
            cleared["lse_grad"] = jnp.where(keep[:, None, :], operands["lse_grad"], 0)
    return cleared, bad
