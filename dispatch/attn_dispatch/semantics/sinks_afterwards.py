"""Sinks taken into the results of a call without sinks. A sink is a score whose value is 0, so

lse' = log(exp(lse) + exp(sink))        out' = out · exp(lse - lse')
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp


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
