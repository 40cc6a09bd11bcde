"""What mistakes are made of."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tests.wrong_implementations.implementation import Array, Call, Results


def clean(x: Array) -> Array:
    """x with 0 for the NaN in padding, wide."""
    return jnp.where(jnp.isnan(x), 0, x).astype(jnp.promote_types(x.dtype, jnp.float32))


def groups(call: Call) -> int:
    return call.spec.num_heads // call.spec.num_kv_heads


def raw_scores(call: Call) -> Array:
    """scale · query · key, wide [B, N, T, S]."""
    key = jnp.repeat(clean(call["key"]), groups(call), axis=2)
    return call.options.meaning.scale * jnp.einsum("btnh,bsnh->bnts", clean(call["query"]), key)


def bias_of(call: Call) -> Array:
    return call["bias"].astype(jnp.float32) if "bias" in call else jnp.zeros((1, 1, 1, 1))


def slopes_of(call: Call) -> Array:
    """[1|B, N, 1, 1]."""
    return call["alibi_slopes"][:, :, None, None]


def lengths_of(call: Call, name: str, full: int) -> Array:
    if name not in call:
        return jnp.full((call.spec.batch, 1, 1, 1), full)
    return jnp.clip(call[name], 0, full)[:, None, None, None]


def distances(call: Call, *, is_aligned: bool = True) -> Array:
    """i + offset - j in a row that is one sequence, [B, 1, T, S]; the offset is 0 if not aligned.

    In rows of several: as if each were one.
    """
    t, s = call.spec.seq_len_q, call.spec.seq_len_kv
    offset: Array | int = 0
    if is_aligned and call.options.meaning.causal_alignment == "bottom_right":
        queries = lengths_of(call, "query_seq_lengths", t)
        offset = lengths_of(call, "key_value_seq_lengths", s) - queries
    rows = jnp.arange(t)[:, None] - jnp.arange(s)[None, :]
    return jnp.broadcast_to(rows + offset, (call.spec.batch, 1, t, s))


def within_band(call: Call, distance: Array) -> Array:
    """The window and causality, of pairs this far apart."""
    left, right = call.spec.band
    may = jnp.ones_like(distance, bool)
    may &= True if left is None else distance <= left
    return may & (True if right is None else distance >= -right)


def masked_by(call: Call, mask: Array, **options: Any) -> Results:
    """The call with one mask more."""
    return call.right({"mask": call["mask"] & mask if "mask" in call else mask}, **options)


def banded_by(call: Call, distance: Array) -> Results:
    """The call whose window and causality go by these distances instead."""
    may = within_band(call, distance)
    return masked_by(call, may, is_causal=False, window=(None, None))


def capped_as(call: Call, score: Array) -> Results:
    """The call with these dense scores, before the mask, in place of its own."""
    changed = {"alibi_slopes": None, "bias": score - raw_scores(call)}
    return call.right(changed, logits_soft_cap=None)


def soft_capped(call: Call, score: Array) -> Array:
    cap = call.options.meaning.logits_soft_cap
    return score if cap is None else cap * jnp.tanh(score / cap)


def alibi_of(call: Call) -> Array:
    if "alibi_slopes" not in call:
        return jnp.zeros((1, 1, 1, 1))
    return -slopes_of(call) * jnp.abs(distances(call))


def of_first(x: Array, axis: int = 0) -> Array:
    """x with what stands first along an axis in all its places."""
    return jnp.broadcast_to(jnp.take(x, jnp.array([0]), axis=axis), x.shape)


def misread(x: Array) -> Array:
    """x [..., T, S] whose memory is taken for that of [..., S, T], transposed."""
    *batch, t, s = x.shape
    return x.reshape(*batch, s, t).swapaxes(-1, -2)


def rows_of(call: Call, keep: Array) -> dict[str, Array | None]:
    """The cotangents, 0 but for these rows and heads: bool [1|B, T|1, N|1]."""
    changed: dict[str, Array | None] = {
        "out_grad": jnp.where(keep[..., None], call["out_grad"], 0),
    }
    if "lse_grad" in call:
        changed["lse_grad"] = jnp.where(keep.swapaxes(1, 2), call["lse_grad"], 0)
    return changed


def without_dropout(call: Call) -> Results:
    return call.right({"dropout_key": None}, dropout_rate=0.0)


def times(results: Results, name: str, factor: float) -> Results:
    """The results, one of them multiplied if it is there."""
    return results | ({name: results[name] * factor} if name in results else {})


def mantissa(x: Array, bits: int) -> Array:
    """x rounded to that many bits after the leading one."""
    wide = x.astype(jnp.float32)
    fraction, exponent = jnp.frexp(wide)
    rounded = jnp.ldexp(jnp.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
    return jnp.where(jnp.isfinite(wide), rounded, wide).astype(x.dtype)


def gradient_of_first(call: Call, name: str) -> Results:
    is_first = (jnp.arange(call.spec.batch) == 0)[:, None, None]
    found = call.right(rows_of(call, is_first))
    return call.right() | {x: y for x, y in found.items() if x == name}
