"""Calls with several dropout keys: one call for the batch rows of each, one after the other."""

from __future__ import annotations

import jax.numpy as jnp

from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import AskedOf, Calls, NamedArrays, Rewrite, changed
from attn_dispatch.typed_jax import mapped


def _when(spec: AttentionSpec) -> bool:
    keys = _keys(spec)
    if keys == 1 or any(map(is_mod_operand, spec.wanted.gradients)):
        return False
    copies = spec.shape("mods_start")[0] if spec.meaning.mods else keys
    return not (copies % keys and keys % copies)


def _inner(spec: AttentionSpec) -> AttentionSpec:
    keys = _keys(spec)
    rows = {
        x.name: ((x.shape[0] // min(keys, x.shape[0]), *x.shape[1:]), x.dtype)
        for x in spec.operands
        if x.shape[0] > 1
    }
    return changed(spec, arrays=rows)


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    keys = _keys(spec)
    operands = operands | _mod_operands(spec, operands, keys)
    shared = {name: x for name, x in operands.items() if x.shape[0] == 1}
    parts = {
        name: x.reshape(keys, x.shape[0] // keys, *x.shape[1:])
        for name, x in operands.items()
        if name not in shared
    }

    def of_one_key(part: NamedArrays) -> NamedArrays:
        return dict(calls.kernel(part | shared))

    results = mapped(of_one_key, parts)
    return {
        name: jnp.sum(x, axis=0, dtype=jnp.float32).astype(x.dtype)
        if spec.is_backward and name in shared
        else x.reshape(-1, *x.shape[2:])
        for name, x in results.items()
    }


CALL_FOR_EACH_KEY = Rewrite(
    "dropout keys: a call for the batch rows of each",
    _inner,
    _compute,
    asked_of=AskedOf(("dropout_key",)),
    when=_when,
    # Kernels draw other masks for the calls of one key. But no kernel takes several keys, in either
    # direction, so this rewrite is always taken, and both directions have the same mask.
    moves_dropout=False,
    needed_for="dropout/keys_of_rows_bf16_d64_256x256",
)


def _keys(spec: AttentionSpec) -> int:
    return spec.shape("dropout_key")[0]


def _mod_operands(spec: AttentionSpec, operands: NamedArrays, keys: int) -> NamedArrays:
    """The arrays that mods read and the start of b, repeated so that each key has its own."""
    if not spec.meaning.mods:
        return {}
    start = operands["mods_start"]
    copies = start.shape[0]
    if copies >= keys:
        return {}
    repeats = keys // copies
    calls = jnp.arange(keys, dtype=jnp.int32) % repeats
    first = jnp.repeat(start, repeats, axis=0).at[:, 0].add(calls * (spec.batch // keys))
    read = {x: y for x, y in operands.items() if is_mod_operand(x) and y.shape[0] > 1}
    return {x: jnp.repeat(y, repeats, axis=0) for x, y in read.items()} | {"mods_start": first}
