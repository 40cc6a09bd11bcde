"""Calls with head dims beyond 256, by the kernels of ffpa-attn that `build-fa4` compiles as well.

They read no mask: each query sees all keys, or a call is causal, with one more visible key for each
query. They know the head dim as they run, any multiple of 8, and add in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.fa4.call import KernelCall
from attn_dispatch.fa4.compiled import (
    WIDE_BACKWARD_TARGET,
    WIDE_FORWARD_TARGET,
    CompiledLibrary,
    KernelSet,
)
from attn_dispatch.fa4.rules import RULES
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import mask_data
from attn_dispatch.semantics.common_rules import DTYPE
from attn_dispatch.semantics.scaled_query import positive_scale, scaled_query
from attn_dispatch.semantics.wider_arrays import pad_last, padded_bytes, prepend, round_up

FEATURES = ("causality and windows", "deterministic_backward", "the gradient of lse")

Operands = Mapping[str, jax.Array]
Results = tuple[jax.Array, ...]
"""The results of a call, in the order of its spec."""

_NARROWEST, _WIDEST = 257, 512
_COLUMNS = 8
"""Head dims are multiples of it."""


def is_wide(spec: AttentionSpec) -> bool:
    """Whether these kernels are the ones for the call's head dims."""
    return max(spec.head_dim, spec.head_dim_v) >= _NARROWEST


@dataclass(frozen=True)
class _Seen:
    """The keys that queries see: the first `keys`. If causal, the last query sees all of them, and
    each one before it a key less."""

    is_causal: bool
    keys: int

    @staticmethod
    def of(spec: AttentionSpec) -> _Seen:
        right = spec.band[1]
        if right is not None and spec.meaning.causal_alignment == "bottom_right":
            right += spec.seq_len_kv - spec.seq_len_q
        if right is None or right >= spec.seq_len_kv - 1:  # the first query sees all
            return _Seen(is_causal=False, keys=spec.seq_len_kv)
        return _Seen(is_causal=True, keys=spec.seq_len_q + right)

    def unseen_rows(self, spec: AttentionSpec) -> int:
        """The number of queries that see nothing, the first ones."""
        return max(spec.seq_len_q - self.keys, 0) if self.is_causal else 0


def _has_window(spec: AttentionSpec) -> bool:
    """Whether the left side hides a key, from the last query if from any."""
    left = spec.band[0]
    if left is None:
        return False
    offset = spec.seq_len_kv - spec.seq_len_q
    is_right = spec.meaning.causal_alignment == "bottom_right"
    return spec.seq_len_q - 1 + (offset if is_right else 0) > left


_WINDOW = Rule[AttentionSpec](
    "fa4/wide_window",
    _has_window,
    f"a window with head dims from {_NARROWEST} on, whose kernels have none",
)

_CORNER = Rule[AttentionSpec](
    "fa4/wide_causal",
    lambda s: not 1 <= _Seen.of(s).keys <= s.seq_len_kv,
    "{queries:,} queries and {keys:,} keys, where the last query would be level with key {level:,}:"
    f" kernels for head dims from {_NARROWEST} on take calls in which it sees a key, and is not "
    "past the last",
    lambda s: (
        'pass causal_alignment="bottom_right", if that is meant'
        if s.seq_len_kv and s.band[1] == 0 and s.seq_len_q != s.seq_len_kv
        else ""
    ),
    facts=lambda s: {
        "queries": s.seq_len_q,
        "keys": s.seq_len_kv,
        "level": _Seen.of(s).keys,
    },
)


_COMPILED = Rule[KernelCall](
    "fa4/wide_head_dim",
    lambda c: kernels_for(c.spec, c.library) is None,
    "kernels are compiled for {compiled}, got {width}/{width_v} {dtype}",
    lambda c: c.remedy({"sm90": _WIDEST}),
    facts=lambda c: c.facts(lambda x: not x.variant),
)


def not_supported_reasons(spec: AttentionSpec, library: CompiledLibrary) -> tuple[Reason, ...]:
    """Every reason against a call by these kernels, on a device that they run on."""
    whose = f"FlashAttention-4's kernels for head dims from {_NARROWEST} on have none"
    shapes = mask_data.not_supported_reasons(spec)
    reasons = (
        *unknown_features(spec, FEATURES, whose),
        *broken((DTYPE, *RULES, _WINDOW), spec),
        *(shapes or broken((_CORNER,), spec)),
    )
    if not library.is_usable or DTYPE.applies(spec):
        return reasons
    return (*reasons, *broken((_COMPILED,), KernelCall(spec, library)))


def kernels_for(spec: AttentionSpec, library: CompiledLibrary) -> KernelSet | None:
    """The narrowest kernels that hold the call's columns; None if none do."""
    width = columns(spec)
    return library.set_for(width, width, spec.dtype, is_wide=True)


def columns(spec: AttentionSpec) -> int:
    """The head dim that the kernels get; it is the same for value."""
    return round_up(max(spec.head_dim, spec.head_dim_v), _COLUMNS)


def plan(spec: AttentionSpec, kernels: KernelSet) -> Plan:
    """The kernels' head dims, and the memory of lse2, products and wider copies."""
    other, width = padded_bytes(spec, columns(spec), columns(spec)), kernels.head_dim
    if spec.is_backward:
        rows = spec.seq_len_q - _Seen.of(spec).unseen_rows(spec)
        rows = round_up(rows, kernels.backward_tile_m)
        other += 8 * spec.batch * spec.num_heads * rows
    return Plan(f"head dims up to {width}", 0, other)


def forward(spec: AttentionSpec, kernels: KernelSet, operands: Operands) -> Results:
    query, key, value = _wide(spec, operands, ("query", "key", "value"))
    seen = _Seen.of(spec)
    unseen = seen.unseen_rows(spec)
    batch, length, heads, _ = query.shape
    results = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((batch, heads, length - unseen), jnp.float32),
    ]
    call = jax.ffi.ffi_call(WIDE_FORWARD_TARGET, results)
    out, lse = call(query, key, value, **_attributes(spec, kernels, seen))
    found = {"out": out[..., : spec.head_dim_v]}
    if spec.wanted.needs_lse:
        found["lse"] = prepend(lse, unseen, axis=2, value=-math.inf)
    return tuple(found.values())


def backward(spec: AttentionSpec, kernels: KernelSet, operands: Operands) -> Results:
    query, key, value, out_grad = _wide(spec, operands, ("query", "key", "value", "out_grad"))
    seen = _Seen.of(spec)
    products = _products(operands)
    rows = slice(seen.unseen_rows(spec), None)
    lse2 = operands["lse"] * math.log2(math.e)
    # Where all scores of a row are -inf, its weights are 0.
    lse2 = jnp.where(lse2 == -math.inf, 0, lse2)
    tile = kernels.backward_tile_m
    further = (_padded(lse2[..., rows], tile, math.inf), _padded(products[..., rows], tile, 0))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    call = jax.ffi.ffi_call(WIDE_BACKWARD_TARGET, results)
    dq, dk, dv = call(
        query, key, value, out_grad, *further, **_attributes(spec, kernels, seen)
    )  # fmt: skip
    gradients = {
        "query": scaled_query(spec, dq[..., : spec.head_dim]),
        "key": dk[..., : spec.head_dim],
        "value": dv[..., : spec.head_dim_v],
    }
    return tuple(gradients[name] for name in spec.wanted.gradients)


def _products(operands: Operands) -> jax.Array:
    """Σ out · out_grad - lse_grad of each row [B, N, T]."""
    out, out_grad = (operands[x].astype(jnp.float32) for x in ("out", "out_grad"))
    products = (out * out_grad).sum(-1).swapaxes(1, 2)
    return products - operands["lse_grad"] if "lse_grad" in operands else products


def _padded(x: jax.Array, tile: int, value: float) -> jax.Array:
    """x [B, N, R] with whole tiles of rows."""
    missing = -x.shape[2] % tile
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=value)


def _wide(spec: AttentionSpec, operands: Operands, names: tuple[str, ...]) -> list[jax.Array]:
    """These operands with the columns that the kernels take."""
    given = dict(operands) | {"query": scaled_query(spec, operands["query"])}
    return [pad_last(given[x], columns(spec)) for x in names]


def _attributes(
    spec: AttentionSpec, kernels: KernelSet, seen: _Seen
) -> dict[str, str | bool | np.generic]:
    return {
        "set": kernels.name,
        "causal": seen.is_causal,
        "keys": np.int64(seen.keys),
        "scale": np.float32(positive_scale(spec)),
    }
