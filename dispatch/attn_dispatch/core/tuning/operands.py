"""Random arrays for a call, made from its spec."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attn_dispatch.call.options import RESIDUALS
from attn_dispatch.call.spec import AttentionSpec

_SIDES = {"query": 0, "q": 0, "key": 1, "kv": 1}


def made_for(spec: AttentionSpec) -> dict[str, jax.Array]:
    """The operands of a call, except out and lse, which only a forward pass can make.

    Sequences have equal lengths and fill their batch rows; a batch row that may hold several has as
    many as possible. Masks allow nine of ten pairs, windows all, and an offset makes the last query
    level with the last key.
    """
    keys = jax.random.split(jax.random.key(0), len(spec.operands))
    wanted = (x for x in spec.operands if x.name not in RESIDUALS[:2])
    return {x.name: _made(spec, x.name, key) for x, key in zip(wanted, keys, strict=False)}


def _made(spec: AttentionSpec, name: str, key: jax.Array) -> jax.Array:
    shape, dtype = spec.shape(name), jnp.dtype(spec.dtype_of(name))
    if name.endswith("_seq_lengths"):
        return jnp.full(shape, _rows(spec, name), dtype)
    if name.endswith("_segment_ids"):
        return _segment_ids(spec, name, shape)
    if name.startswith("cu_seqlens_"):
        return _cu_seqlens(spec, name, shape)
    if name == "window":
        return jnp.full(shape, spec.seq_len_q + spec.seq_len_kv, dtype)
    if name == "causal_offset":
        return jnp.full(shape, spec.seq_len_kv - spec.seq_len_q, dtype)
    if name == "alibi_slopes":
        return jnp.broadcast_to(2.0 ** -jnp.linspace(1, 8, shape[-1]), shape).astype(dtype)
    if dtype == jnp.bool_:
        return jax.random.bernoulli(key, 0.9, shape)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(key, shape, dtype)
    return jnp.zeros(shape, dtype)


def _rows(spec: AttentionSpec, name: str) -> int:
    """The number of queries or keys in a batch row, whichever the operand is about."""
    side = _SIDES[name.removeprefix("cu_seqlens_").split("_")[0]]
    return (spec.seq_len_q, spec.seq_len_kv)[side]


def _longest(spec: AttentionSpec, name: str) -> int:
    side = _SIDES[name.removeprefix("cu_seqlens_").split("_")[0]]
    return spec.longest_sequences[side]


def _ends(spec: AttentionSpec, name: str, count: int) -> jax.Array:
    """Where each of `count` sequences ends, int32 [count]; none is longer than the spec allows."""
    numbers, rows = jnp.arange(1, count + 1, dtype=jnp.int32), _rows(spec, name)
    evenly = jnp.round(numbers * (rows / count)).astype(jnp.int32)
    return jnp.minimum(evenly, numbers * _longest(spec, name))


def _segment_ids(spec: AttentionSpec, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Ids ascending from 1, then 0; eight segments if the spec gives no number."""
    count = min(spec.most_sequences or 8, _rows(spec, name))
    ends = _ends(spec, name, max(count, 1))
    places = jnp.arange(shape[1], dtype=jnp.int32)
    ids = jnp.searchsorted(ends, places, side="right").astype(jnp.int32) + 1
    return jnp.broadcast_to(jnp.where(places < ends[-1], ids, 0), shape)


def _cu_seqlens(spec: AttentionSpec, name: str, shape: tuple[int, ...]) -> jax.Array:
    ends = _ends(spec, name, shape[1] - 1) if shape[1] > 1 else jnp.zeros(0, jnp.int32)
    return jnp.broadcast_to(jnp.concatenate([jnp.zeros(1, jnp.int32), ends]), shape)
