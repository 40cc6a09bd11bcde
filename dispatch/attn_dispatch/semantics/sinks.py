"""Sinks, taken into a call's results, and their gradient. The value of a sink is a vector of 0:

lse' = log(exp(lse) + exp(sink))        out' = out · exp(lse - lse')
d sink = Σ exp(sink - lse) · (dlse - delta)        delta = Σ out · dout
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec


def sinks_grad(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The gradient of sinks, [1|B, N], in a backward call."""
    row_grad = -delta_of(operands)
    if spec.has("lse_grad"):
        row_grad = row_grad + operands["lse_grad"]
    return sinks_grad_of_rows(spec, operands, row_grad)


def sinks_grad_of_rows(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], row_grad: jax.Array
) -> jax.Array:
    """The same from dlse - delta of each row, [B, N, T]."""
    lse = operands["lse"]
    sinks = operands["sinks"].astype(jnp.float32)[:, :, None]
    # Padding rows may hold NaN.
    grad = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks - lse) * row_grad).sum(axis=2)
    if spec.shape("sinks")[0] == 1:
        grad = grad.sum(axis=0, keepdims=True)
    return grad.astype(spec.dtype_of("sinks"))


def delta_of(operands: Mapping[str, jax.Array]) -> jax.Array:
    """Σ out · dout over the columns of value, float32 [B, N, T]."""
    products = operands["out"].astype(jnp.float32) * operands["out_grad"].astype(jnp.float32)
    return jnp.swapaxes(products.sum(axis=-1), 1, 2)


def with_sinks(results: Mapping[str, jax.Array], sinks: jax.Array) -> dict[str, jax.Array]:
    """The results of a call without sinks, with `sinks` [..., N] taken into out and lse."""
    out, lse = results["out"], results["lse"]
    is_padding = lse == -jnp.inf
    whole = jnp.where(is_padding, -jnp.inf, jnp.logaddexp(lse, sinks.astype(lse.dtype)[..., None]))
    share = jnp.where(is_padding, 0, jnp.exp(lse - jnp.where(is_padding, 0, whole)))
    out = (out.astype(lse.dtype) * share.swapaxes(-1, -2)[..., None]).astype(out.dtype)
    # Without a barrier XLA may use out from before it was rounded. But gradients are computed from
    # out as it is returned.
    return dict(results) | {"out": jax.lax.optimization_barrier(out), "lse": whole}
