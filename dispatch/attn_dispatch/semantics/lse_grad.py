"""The gradient through lse, for vendor kernels that do not take one: extra columns of value.

    ds = p · (dp - delta + dlse)        delta = Σ out · dout, over the columns of value

Kernels compute delta themselves. In three extra columns value is 0, out is -w and dout is a part of
dlse / w. They turn delta into delta - dlse and change neither p nor dp; their columns of dvalue are
dropped. Each part is the remainder of dlse after the previous rounding to 16 bits, and the weights
w keep float16 in range: together the parts are dlse to float32's accuracy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.typed_jax import precision_of

_WEIGHTS = (2.0**8, 2.0**-3, 2.0**-14)

COLUMNS = len(_WEIGHTS)
"""The number of extra columns of value."""


def with_lse_grad(
    out: jax.Array, out_grad: jax.Array, lse: jax.Array, lse_grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """out and out_grad with the extra columns, [B, T, N, V + 3]; lse and lse_grad are [B, N, T]."""
    bits = precision_of(out_grad.dtype)
    # The gradient of a padding row's lse may be NaN.
    left = jnp.where(lse == -jnp.inf, 0, lse_grad).swapaxes(1, 2)[..., None]
    outs, grads = [out], [out_grad]
    for weight in _WEIGHTS:
        # Not astype and back: XLA may remove a pair of conversions that loses bits.
        part = lax.reduce_precision(left / weight, *bits)
        left = left - part * weight
        outs.append(jnp.full(part.shape, -weight, out.dtype))
        grads.append(part.astype(out_grad.dtype))
    return jnp.concatenate(outs, axis=-1), jnp.concatenate(grads, axis=-1)
