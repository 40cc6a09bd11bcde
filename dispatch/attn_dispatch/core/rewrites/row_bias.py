"""A bias that is the same for all keys of a row: it shifts lse, and changes nothing else.

The gradient of the bias is the sum of the scores' gradients over the row, which needs no scores:

    Σ p · (dp - delta + dlse) = p_sink · delta + (1 - p_sink) · dlse        delta = Σ out · dout

A row whose bias is -inf attends nothing. The bias does not apply to a sink, so sinks are taken into
the results afterwards.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    AskedOf,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    gradients_without,
)
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.real_rows import NO_WEIGHT
from attn_dispatch.semantics.sinks import delta_of, sinks_grad, with_sinks
from attn_dispatch.semantics.sums import sum_like


def _inner(spec: AttentionSpec) -> AttentionSpec:
    return changed(
        spec,
        without=("bias", "sinks"),
        wanted=replace(
            spec.wanted,
            gradients=gradients_without(spec, "bias", "sinks"),
            # lse shows which rows attend nothing, and sinks need it.
            needs_lse=not spec.is_backward or spec.wanted.needs_lse,
        ),
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    shift = operands["bias"][..., 0].astype(jnp.float32)  # [1|B, 1|N, 1|T]
    if spec.is_backward:
        return _backward(spec, inner, operands, shift, calls)
    results = dict(calls.kernel(for_(inner, operands)))
    is_padding = (shift == -jnp.inf) | (results["lse"] == -jnp.inf)
    # A bias of NaN or +inf makes out NaN, too. In rows that attend nothing, 0 replaces it below.
    no_number = jnp.where(jnp.isfinite(shift), 0.0, jnp.nan)
    out = results["out"] + no_number.swapaxes(1, 2)[..., None].astype(results["out"].dtype)
    results["out"] = _cleared(is_padding, out)
    for name in ("lse", "row_max"):
        if name in results:
            results[name] = jnp.where(is_padding, -jnp.inf, results[name] + shift)
    # This must come last: a row that attends nothing is NaN nevertheless if its lengths, ids or
    # window are invalid.
    results = nan_where_invalid(spec, operands, results)
    return with_sinks(results, operands["sinks"]) if spec.has("sinks") else results


def _backward(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, shift: jax.Array, calls: Calls
) -> NamedArrays:
    lse = operands["lse"]
    is_padding = lse == -jnp.inf
    given = for_(inner, operands)
    given["lse"] = jnp.where(is_padding, NO_WEIGHT, lse - jnp.where(is_padding, 0, shift))
    given["out_grad"] = _cleared(is_padding, given["out_grad"])
    if spec.has("lse_grad"):
        given["lse_grad"] = jnp.where(is_padding, 0, given["lse_grad"])
    results = dict(calls.kernel(given))
    if "sinks" in spec.wanted.gradients:
        results["sinks"] = sinks_grad(spec, operands)
    if "bias" in spec.wanted.gradients:
        grad = sum_like(_row_grad(spec, operands)[..., None], spec.shape("bias"))
        results["bias"] = grad.astype(spec.dtype_of("bias"))
    return results


def _row_grad(spec: AttentionSpec, operands: NamedArrays) -> jax.Array:
    """The sum of the scores' gradients over keys, [B, N, T]."""
    lse = operands["lse"]
    grad = operands["lse_grad"] if spec.has("lse_grad") else jnp.zeros_like(lse)
    if spec.has("sinks"):
        above = operands["sinks"].astype(lse.dtype)[:, :, None] - lse
        grad = jnp.exp(above) * delta_of(operands) - jnp.expm1(above) * grad
    # Rows that attend nothing may hold NaN.
    return jnp.where(lse == -jnp.inf, 0, grad)


def _cleared(is_padding: jax.Array, x: jax.Array) -> jax.Array:
    """x [B, T, N, V] with 0 in the rows of `is_padding` [1|B, 1|N, 1|T]."""
    return jnp.where(is_padding.swapaxes(1, 2)[..., None], 0, x)


ROW_BIAS = Rewrite(
    "a bias that is the same for all keys: put into lse afterwards",
    _inner,
    _compute,
    asked_of=AskedOf(("bias",)),
    when=lambda spec: spec.shape("bias")[3] == 1,
    reads_lse=True,
    needed_for="bias/of_11t1_bf16_d64_256x256",
)
