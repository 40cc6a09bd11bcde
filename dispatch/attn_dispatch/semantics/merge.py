"""Attention over several sets of keys, merged from the out and lse of each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

_MAX_UNROLLED_PARTS = 16
"""Up to so many parts are added one by one, in one fused kernel; a sum over an axis is a kernel."""


def merged(out: jax.Array, lse: jax.Array, *more: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over several sets of keys, from the out and lse of each; differentiable.

        lse = log(exp(lse_0) + exp(lse_1) + …)
        out = out_0 · exp(lse_0 - lse) + out_1 · exp(lse_1 - lse) + …

    The sums are float32 for outputs of 16 bits, and are rounded once. A row without keys, whose lse
    is -inf, contributes nothing, even if its out is NaN. A row without keys in any set gets out 0
    and lse -inf, and gives gradients of 0.

    Args:
      out: the output [..., V] for the first set of keys.
      lse: its lse [...].
      *more: out and lse of each further set.

    Returns:
      out [..., V] and lse [...], with the dtypes of the first set. Pass a float32 out to merge what
      arrives part by part, because rounding out to 16 bits at each step adds up.

    Raises:
      ValueError: the shapes do not match.
    """
    parts = (out, lse, *more)
    outs, lses = parts[::2], parts[1::2]
    shapes = [jnp.shape(x) for x in parts]
    rows = shapes[0][:-1]
    if shapes != [shapes[0], rows] * len(outs):
        raise ValueError(
            f"merge: expected out {list(shapes[0])} and lse {list(rows)} of each set of keys, got "
            f"{', '.join(str(list(x)) for x in shapes)}"
        )
    each, total = shares(lses)
    weighted = (_weighted(x.astype(total.dtype), y) for x, y in zip(outs, each, strict=True))
    return functools.reduce(jnp.add, weighted).astype(out.dtype), total


def merged_parts(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All parts along axis 1 merged: out [B, parts, ..., V] and lse [B, parts, ...].

    The merged out has lse's dtype. Rows without keys in any part get out 0 and lse -inf.
    """
    if (parts := lse.shape[1]) <= _MAX_UNROLLED_PARTS:
        each, lse = shares([lse[:, i] for i in range(parts)])
        return functools.reduce(jnp.add, (_weighted(out[:, i], x) for i, x in enumerate(each))), lse
    top = lse.max(axis=1, keepdims=True)
    weight = _weight(lse, top)
    total = weight.sum(axis=1, keepdims=True)
    out = _weighted(out, weight / jnp.where(total == 0, 1, total)).sum(axis=1)
    return out, _lse(top, total)[:, 0]


def shares(lse: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Each part's share in the softmax over all parts, and the lse of all.

    `lse` has one entry per part: its lse, or a single score. The sums are written part by part, so
    that XLA fuses them into one kernel. Without keys in any part the shares are 0 and lse is -inf;
    their gradients are 0.
    """
    top = functools.reduce(jnp.maximum, lse)
    weights = [_weight(x, top) for x in lse]
    total = functools.reduce(jnp.add, weights)
    return [x / jnp.where(total == 0, 1, total) for x in weights], _lse(top, total)


# Where jnp.where replaces a result, its derivative is multiplied by 0, and 0 · inf and 0 · NaN are
# NaN. So -inf and NaN are replaced before anything is computed with them.


def _weight(lse: jax.Array, top: jax.Array) -> jax.Array:
    """exp(lse - top), 0 for a part without keys. `top` only avoids overflow and cancels later."""
    is_empty = lse == -jnp.inf
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    return jnp.where(is_empty, 0, jnp.exp(jnp.where(is_empty, 0, lse) - top))


def _lse(top: jax.Array, total: jax.Array) -> jax.Array:
    is_empty = total == 0
    lse = lax.stop_gradient(top) + jnp.log(jnp.where(is_empty, 1, total))
    return jnp.where(is_empty, -jnp.inf, lse)


def _weighted(out: jax.Array, share: jax.Array) -> jax.Array:
    """out [..., V] times share [...]; 0 where share is 0, even if out is NaN."""
    share = share[..., None]
    return jnp.where(share == 0, 0, out) * share
