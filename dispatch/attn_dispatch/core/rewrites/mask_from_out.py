"""The dropout mask of a kernel that does not return it, read from its output for chosen values.

If query and key are 0, all scores of a row are equal, and

    out · exp(lse) · (1 - rate) = Σ of the values of the keys kept.

The values are powers of two, so the bits of that sum show which keys were kept. A call reads
`_BITS` keys in each column of value, and further calls read the keys that remain.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import AskedOf, Calls, NamedArrays, Rewrite, changed
from attn_dispatch.typed_jax import mapped

_BITS = 6
"""The number of keys to read from a column. bfloat16 rounds the sum, and before that the factor
1 / (1 - rate), to 8 bits."""


def _when(spec: AttentionSpec) -> bool:
    # A score_mod may make equal scores unequal.
    return (
        spec.wanted.needs_keep
        and bool(spec.meaning.dropout_rate)
        and not spec.meaning.score_mod
        and spec.head_dim_v != 0
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    known = operands | _with_equal_scores(operands)
    _, s, k, columns = spec.shape("value")
    keys = jnp.arange(s, dtype=jnp.int32)

    def read(first: jax.Array | int) -> jax.Array:
        """Whether the keys from `first` on are kept, bool [B, T, N, columns · _BITS]."""
        column, bit = jnp.divmod(keys - first, _BITS)
        # The powers are at most 1, so that no sum overflows.
        power = jnp.left_shift(1, bit) / 2 ** (_BITS - 1)
        is_there = column[:, None] == jnp.arange(columns)[None, :]
        value = jnp.where(is_there, power[:, None], 0)[None, :, None, :]
        value = jnp.broadcast_to(value, (spec.batch, s, k, columns))
        results = calls.kernel(known | {"value": value.astype(spec.dtype)})
        weight = jnp.exp(results["lse"]).swapaxes(1, 2)[..., None]
        total = results["out"].astype(weight.dtype) * weight * (1 - spec.meaning.dropout_rate)
        number = jnp.round(total * 2 ** (_BITS - 1)).astype(jnp.int32)
        bits = [jnp.right_shift(number, i) & 1 for i in range(_BITS)]
        return (jnp.stack(bits, axis=-1) == 1).reshape(*number.shape[:3], columns * _BITS)

    firsts = range(0, s, columns * _BITS)
    # A loop keeps the program short.
    parts = mapped(read, jnp.asarray(firsts, jnp.int32)) if len(firsts) > 1 else read(0)[None]
    keep = jnp.moveaxis(parts, 0, 3).reshape(*parts.shape[1:4], -1)[..., :s]
    return dict(calls.kernel(operands)) | {"keep": keep.swapaxes(1, 2)}


def _with_equal_scores(operands: NamedArrays) -> NamedArrays:
    """The operands that scores depend on, with values for which all scores but -inf are equal."""
    known = {
        name: jnp.zeros_like(operands[name])
        for name in ("query", "key", "alibi_slopes", "sinks")
        if name in operands
    }
    if "bias" in operands:
        bias = operands["bias"]
        known["bias"] = jnp.where(bias == -jnp.inf, bias, 0)
    return known


MASK_FROM_OUT = Rewrite(
    "the dropout mask: read from the kernel's output for known values",
    lambda spec: changed(spec, wanted=replace(spec.wanted, needs_keep=False, needs_lse=True)),
    _compute,
    asked_of=AskedOf(("dropout_key",), "forward"),
    when=_when,
    needed_for="dropout/tenth_bf16_d64_256x256",
)
