"""The gradient through lse, which vendor kernels do not take, by way of columns that they do.

    ds = p · (dp - delta + dlse)        delta = Σ out · dout, over the columns of value

Kernels compute delta themselves. Three more columns, in which value is 0, out is -w and dout is a
part of dlse / w, make it delta - dlse and change neither p nor dp; those of dvalue are dropped. The
parts are what is left of dlse after each rounding to 16 bits, by weights w that keep float16 in its
range: together they are dlse to float32's accuracy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_WEIGHTS = (2.0**8, 2.0**-3, 2.0**-14)

COLUMNS = len(_WEIGHTS)
"""How many columns of value it takes."""


def with_lse_grad(
    out: jax.Array, out_grad: jax.Array, lse: jax.Array, lse_grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """out and out_grad with COLUMNS more, [B, T, N, V + 3]; lse and its gradient are [B, N, T]."""
    facts = jnp.finfo(out_grad.dtype)
    # What comes back for a row that attends nothing may be NaN.
    left = jnp.where(lse == -jnp.inf, 0, lse_grad).swapaxes(1, 2)[..., None]
    outs, grads = [out], [out_grad]
    for weight in _WEIGHTS:
        # Not by astype and back: XLA may leave out conversions that lose bits.
        part = lax.reduce_precision(left / weight, facts.nexp, facts.nmant)
        left = left - part * weight
        outs.append(jnp.full(part.shape, -weight, out.dtype))
        grads.append(part.astype(out_grad.dtype))
    return jnp.concatenate(outs, axis=-1), jnp.concatenate(grads, axis=-1)
