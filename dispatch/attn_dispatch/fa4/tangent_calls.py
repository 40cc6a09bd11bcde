"""The forward-mode derivative of a call by FlashAttention-4's kernel for it.

From the tangents of query, key and value, and from out and lse, it computes the tangents of both:

    P = exp(S - lse)    P' = P * S'    lse' = sum(P')    out' = P' V + P V' - lse' * out

Sinks are in lse, and so in P. Their own tangents are further terms of a row (`_with_sinks`).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.clear_rows import cleared, cleared_together
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.fa4.call import KernelCall
from attn_dispatch.fa4.compiled import TANGENT_TARGET, CompiledLibrary, KernelSet
from attn_dispatch.fa4.passes import by_row
from attn_dispatch.fa4.rules import MASKS, RULES
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics import interval_plan
from attn_dispatch.semantics.common_rules import DTYPE
from attn_dispatch.semantics.interval_plan import PlanTiles
from attn_dispatch.semantics.mask_arrays import MaskArrays
from attn_dispatch.semantics.mask_data import data_bytes, has_bits
from attn_dispatch.semantics.real_rows import each_query_attends
from attn_dispatch.semantics.scaled_query import positive_scale, scaled_query
from attn_dispatch.semantics.tile_lists import TileSizes
from attn_dispatch.semantics.wider_arrays import pad_last, padded_bytes

FEATURES = (*MASKS, "sinks")

_NAMES = ("query", "key", "value")


_COMPILED = Rule[KernelCall](
    "fa4/tangent",
    lambda c: kernels_for(c.spec, c.library) is None,
    "kernels of forward-mode derivatives are compiled for {compiled}, got {width}/{width_v} "
    "{dtype}",
    facts=lambda c: c.facts(lambda x: x.has_tangents),
)


def not_supported_reasons(spec: AttentionSpec, library: CompiledLibrary) -> tuple[Reason, ...]:
    """Every reason against the derivative by these kernels, on a device that they run on."""
    whose = "FlashAttention-4's kernel of the forward-mode derivative has none"
    return (
        *unknown_features(spec, FEATURES, whose),
        *broken((DTYPE, *RULES), spec),
        *_kernel_reasons(spec, library),
    )


def _kernel_reasons(spec: AttentionSpec, library: CompiledLibrary) -> tuple[Reason, ...]:
    """The reasons against a call's head dims and mask."""
    if not library.is_usable or DTYPE.applies(spec):
        return ()  # which other reasons say
    kernels = kernels_for(spec, library)
    if kernels is None:
        return broken((_COMPILED,), KernelCall(spec, library))
    return interval_plan.not_supported_reasons(spec, tiles_of(kernels))


def kernels_for(spec: AttentionSpec, library: CompiledLibrary) -> KernelSet | None:
    """The narrowest kernels that hold the call's columns; None if none do."""
    return library.set_for(spec.head_dim, spec.head_dim_v, spec.dtype, has_tangents=True)


def tiles_of(kernels: KernelSet) -> PlanTiles:
    """The tiles that the lists of a derivative name."""
    tile = TileSizes(*kernels.tangent_tiles)
    return PlanTiles(tile, tile)


def plan(spec: AttentionSpec, kernels: KernelSet) -> Plan:
    mask = data_bytes(spec) + interval_plan.lists_bytes(spec, tiles_of(kernels))[0]
    # Tangents have copies as well.
    copies = 2 * padded_bytes(spec, kernels.head_dim, kernels.head_dim_v)
    return Plan("kernel of the derivative", 0, mask + copies)


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
      moved: the tangents of query, key, value and sinks; a missing one is 0.
    """
    given = MaskArrays.of(spec, operands, tiles_of(kernels).forward)
    rows = given.rows
    arrays = [operands[x] for x in _NAMES]
    arrays += [moved[x] if x in moved else jnp.zeros_like(operands[x]) for x in _NAMES]
    for i in (0, 3):
        arrays[i] = scaled_query(spec, arrays[i])
    if rows.real_keys is not None and not spec.has_finite_padding:
        # 0 * NaN is NaN, also where a weight is 0 because the pair is hidden.
        real = by_row(rows.real_keys)
        of_keys = (1, 2, 4, 5)
        clean = cleared_together(*((arrays[i], real) for i in of_keys))
        for i, x in zip(of_keys, clean, strict=True):
            arrays[i] = x
    widths = (kernels.head_dim, kernels.head_dim, kernels.head_dim_v)
    wide = [pad_last(x, width) for x, width in zip(arrays, 2 * widths, strict=True)]
    out, lse = pad_last(operands["out"], kernels.head_dim_v), operands["lse"]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)]
    tile_m, tile_n = kernels.tangent_tiles
    out_moved, lse_moved = jax.ffi.ffi_call(TANGENT_TARGET, results)(
        *wide, out, lse, *given.lists.arrays, rows.mask, set=kernels.name,
        mask="bits" if has_bits(rows.mask) else "rows", tile_m=np.int64(tile_m),
        tile_n=np.int64(tile_n), scale=np.float32(positive_scale(spec)),
    )  # fmt: skip
    out_moved = out_moved[..., : spec.head_dim_v]
    if "sinks" in moved:
        out_moved, lse_moved = _with_sinks(operands, moved["sinks"], out_moved, lse_moved)
    if each_query_attends(spec):
        return out_moved, lse_moved
    # The query of a padding row may be NaN, and invalid rows have an lse of NaN.
    attends = rows.attends
    return cleared(out_moved, by_row(attends)), jnp.where(attends, lse_moved, 0)


def _with_sinks(
    operands: Mapping[str, jax.Array],
    sinks_moved: jax.Array,
    out_moved: jax.Array,
    lse_moved: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The tangents with the term of the sinks' own: a sink is one more score, of value 0."""
    sinks, own = (x.astype(jnp.float32)[:, :, None] for x in (operands["sinks"], sinks_moved))
    term = jnp.exp(sinks - operands["lse"]) * own
    by_row = jnp.swapaxes(term, 1, 2)[..., None] * operands["out"].astype(jnp.float32)
    out_moved = (out_moved.astype(jnp.float32) - by_row).astype(out_moved.dtype)
    return out_moved, lse_moved + term
