"""The forward-mode derivative of a plain call by FlashAttention-4's kernel for it.

From the tangents of query, key and value, and from out and lse, it computes the tangents of both:

    P = exp(S - lse)    P' = P * S'    lse' = sum(P')    out' = P' V + P V' - lse' * out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import TANGENT_TARGET, CompiledLibrary, KernelSet
from attn_dispatch.fa4.rules import RULES
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.common_rules import DTYPE, EMPTY
from attn_dispatch.semantics.scaled_query import positive_scale, scaled_query
from attn_dispatch.semantics.wider_arrays import pad_last

FEATURES = ("causality and windows",)

_ALL_KEYS, _CAUSAL = (None, None), (None, 0)
"""The bands of the two kernels."""

_WINDOW = Rule[AttentionSpec](
    "fa4/tangent_window",
    lambda s: s.band not in (_ALL_KEYS, _CAUSAL),
    "a window: the kernel of the forward-mode derivative has none",
)

_SQUARE = Rule[AttentionSpec](
    "fa4/tangent_causal",
    lambda s: s.band == _CAUSAL and s.seq_len_q != s.seq_len_kv,
    "causality with {queries:,} queries and {keys:,} keys: the kernel of the forward-mode "
    "derivative takes as many of both",
    facts=lambda s: {"queries": s.seq_len_q, "keys": s.seq_len_kv},
)


@dataclass(frozen=True)
class _KernelCall:
    """A call, and the kernels that were compiled."""

    spec: AttentionSpec
    library: CompiledLibrary


_COMPILED = Rule[_KernelCall](
    "fa4/tangent",
    lambda c: kernels_for(c.spec, c.library) is None,
    "kernels of forward-mode derivatives are compiled for {compiled}, got {width}/{width_v} "
    "{dtype}",
    facts=lambda c: {
        "compiled": compiled.names(x for x in c.library.sets if x.has_tangents) or "no head dims",
        "width": c.spec.head_dim,
        "width_v": c.spec.head_dim_v,
        "dtype": c.spec.dtype,
    },
)


def not_supported_reasons(spec: AttentionSpec, library: CompiledLibrary) -> tuple[Reason, ...]:
    """Every reason against the derivative by these kernels, on a device that they run on."""
    whose = "FlashAttention-4's kernel of the forward-mode derivative has none"
    reasons = (
        *unknown_features(spec, FEATURES, whose),
        *broken((DTYPE, EMPTY, *RULES, _WINDOW, _SQUARE), spec),
    )
    if not library.is_usable or DTYPE.applies(spec):
        return reasons
    return (*reasons, *broken((_COMPILED,), _KernelCall(spec, library)))


def kernels_for(spec: AttentionSpec, library: CompiledLibrary) -> KernelSet | None:
    """The narrowest kernels that hold the call's columns; None if none do."""
    return library.set_for(spec.head_dim, spec.head_dim_v, spec.dtype, has_tangents=True)


def tangents(
    spec: AttentionSpec,
    kernels: KernelSet,
    operands: Mapping[str, jax.Array],
    moved: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse.

    Args:
      spec: the call.
      kernels: those of `kernels_for`.
      operands: its operands, out and lse.
      moved: the tangents of query, key and value; one that is not there is 0.
    """
    names = ("query", "key", "value")
    given = [operands[x] for x in names]
    given += [moved[x] if x in moved else jnp.zeros_like(operands[x]) for x in names]
    for i in (0, 3):
        given[i] = scaled_query(spec, given[i])
    widths = (kernels.head_dim, kernels.head_dim, kernels.head_dim_v)
    wide = [pad_last(x, width) for x, width in zip(given, 2 * widths, strict=True)]
    out, lse = pad_last(operands["out"], kernels.head_dim_v), operands["lse"]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)]
    out_moved, lse_moved = jax.ffi.ffi_call(TANGENT_TARGET, results)(
        *wide, out, lse, set=kernels.name, causal=spec.band == _CAUSAL,
        scale=np.float32(positive_scale(spec)),
    )  # fmt: skip
    return out_moved[..., : spec.head_dim_v], lse_moved
