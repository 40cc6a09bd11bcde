"""Parts of which the mistakes are composed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tests.wrong_implementations.implementation import Array, Call, Results


def clean(x: Array) -> Array:
    """x with 0 in place of the NaN in padding, in float32 or wider."""
    return jnp.where(jnp.isnan(x), 0, x).astype(jnp.promote_types(x.dtype, jnp.float32))


def groups(call: Call) -> int:
    return call.spec.num_heads // call.spec.num_kv_heads


def raw_scores(call: Call) -> Array:
    """scale · query · key, [B, N, T, S] in float32 or wider."""
    key = jnp.repeat(clean(call["key"]), groups(call), axis=2)
    return call.options.meaning.scale * jnp.einsum("btnh,bsnh->bnts", clean(call["query"]), key)


def bias_of(call: Call) -> Array:
    return call["bias"].astype(jnp.float32) if "bias" in call else jnp.zeros((1, 1, 1, 1))


def slopes_of(call: Call) -> Array:
    """The ALiBi slopes, [1|B, N, 1, 1]."""
    return call["alibi_slopes"][:, :, None, None]


def lengths_of(call: Call, name: str, full: int) -> Array:
    if name not in call:
        return jnp.full((call.spec.batch, 1, 1, 1), full)
    return jnp.clip(call[name], 0, full)[:, None, None, None]


def distances(call: Call, *, is_aligned: bool = True) -> Array:
    """i + offset - j in each row, taken as one sequence, [B, 1, T, S].

    Unless `is_aligned`, the offset is 0.
    """
    t, s = call.spec.seq_len_q, call.spec.seq_len_kv
    offset: Array | int = 0
    if is_aligned and call.options.meaning.causal_alignment == "bottom_right":
        queries = lengths_of(call, "query_seq_lengths", t)
        offset = lengths_of(call, "key_value_seq_lengths", s) - queries
    rows = jnp.arange(t)[:, None] - jnp.arange(s)[None, :]
    return jnp.broadcast_to(rows + offset, (call.spec.batch, 1, t, s))


def within_band(call: Call, distance: Array) -> Array:
    """True for the distances that the window and causality allow."""
    left, right = call.spec.band
    is_within = jnp.ones_like(distance, bool)
    is_within &= True if left is None else distance <= left
    return is_within & (True if right is None else distance >= -right)


def masked_by(call: Call, mask: Array, **options: Any) -> Results:
    """The results of the call with one mask more."""
    return call.right({"mask": call["mask"] & mask if "mask" in call else mask}, **options)


def banded_by(call: Call, distance: Array) -> Results:
    """The results of the call with its window and causality computed from these distances."""
    is_within = within_band(call, distance)
    return masked_by(call, is_within, is_causal=False, window=(None, None))


def with_scores(call: Call, score: Array) -> Results:
    """The results of the call with these dense scores, before the mask, in place of the right."""
    changed = {"alibi_slopes": None, "bias": score - raw_scores(call)}
    return call.right(changed, logits_soft_cap=None)


def soft_capped(call: Call, score: Array) -> Array:
    cap = call.options.meaning.logits_soft_cap
    return score if cap is None else cap * jnp.tanh(score / cap)


def alibi_of(call: Call) -> Array:
    if "alibi_slopes" not in call:
        return jnp.zeros((1, 1, 1, 1))
    return -slopes_of(call) * jnp.abs(distances(call))


def first_everywhere(x: Array, axis: int = 0) -> Array:
    """x with its first slice along `axis` in place of every slice."""
    return jnp.broadcast_to(jnp.take(x, jnp.array([0]), axis=axis), x.shape)


def misread(x: Array) -> Array:
    """x [..., T, S] read as if it lay in memory as [..., S, T], transposed."""
    *batch, t, s = x.shape
    return x.reshape(*batch, s, t).swapaxes(-1, -2)


def rows_of(call: Call, keep: Array) -> dict[str, Array | None]:
    """The cotangents, 0 except where `keep` [1|B, T|1, N|1] is true."""
    changed: dict[str, Array | None] = {
        "out_grad": jnp.where(keep[..., None], call["out_grad"], 0),
    }
    if "lse_grad" in call:
        changed["lse_grad"] = jnp.where(keep.swapaxes(1, 2), call["lse_grad"], 0)
    return changed


def without_dropout(call: Call) -> Results:
    return call.right({"dropout_key": None}, dropout_rate=0.0)


def times(results: Results, name: str, factor: float) -> Results:
    """The results, with the one of this name, if present, multiplied by `factor`."""
    return results | ({name: results[name] * factor} if name in results else {})


def mantissa(x: Array, bits: int) -> Array:
    """x rounded to `bits` bits after the leading one."""
    wide = x.astype(jnp.float32)
    fraction, exponent = jnp.frexp(wide)
    rounded = jnp.ldexp(jnp.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
    return jnp.where(jnp.isfinite(wide), rounded, wide).astype(x.dtype)


def gradient_of_first(call: Call, name: str) -> Results:
    """The right results, but for one gradient, which comes from the first batch row alone."""
    is_first = (jnp.arange(call.spec.batch) == 0)[:, None, None]
    found = call.right(rows_of(call, is_first))
    return call.right() | {x: y for x, y in found.items() if x == name}
