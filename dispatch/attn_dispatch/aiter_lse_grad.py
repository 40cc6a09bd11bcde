"""The gradient through lse, which AITER's kernels do not take, by way of two columns that they do.

    ds = p · (dp - delta + dlse)        delta = Σ out · dout, over the columns of value

Kernels compute delta themselves. Two more columns, -1 in out and dlse in dout, make it
delta - dlse. They are 0 in value, so that neither p nor dp changes, and those of dvalue are
dropped. There are two because a 16-bit number holds too little of dlse: the second has what the
first lacks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

COLUMNS = 2


def with_lse_grad(
    out: jax.Array, out_grad: jax.Array, lse: jax.Array, lse_grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """out and out_grad with COLUMNS more, [B, T, N, V + 2]; lse and its gradient are [B, N, T]."""
    lse_grad = jnp.where(lse == -jnp.inf, 0, lse_grad)
    facts = jnp.finfo(out_grad.dtype)
    # Not by astype and back: XLA may leave out conversions that lose bits.
    high = lax.reduce_precision(lse_grad, facts.nexp, facts.nmant)
    columns = jnp.stack([high, lse_grad - high], axis=-1).swapaxes(1, 2).astype(out_grad.dtype)
    return (
        jnp.concatenate([out, jnp.full_like(columns, -1)], axis=-1),
        jnp.concatenate([out_grad, columns], axis=-1),
    )
