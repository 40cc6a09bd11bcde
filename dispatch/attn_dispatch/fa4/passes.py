"""The forward and backward pass of FlashAttention-4's compiled kernels.

They convert a call's operands to the kernels' arrays, and the kernels' results to the call's.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.clear_rows import cleared, cleared_together
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.fa4 import interval_calls
from attn_dispatch.fa4.call import score_change, tiles_of
from attn_dispatch.fa4.compiled import KernelSet
from attn_dispatch.fa4.interval_calls import Change
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.semantics.interval_plan import lists_bytes
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch.semantics.invalid_values import may_be_invalid, nan_where
from attn_dispatch.semantics.mask_arrays import MaskArrays
from attn_dispatch.semantics.mask_data import data_bytes
from attn_dispatch.semantics.real_rows import each_query_attends, may_have_padding
from attn_dispatch.semantics.row_flags import PADDING, REAL, with_invalid
from attn_dispatch.semantics.scaled_query import positive_scale, scaled_query
from attn_dispatch.semantics.sinks import sinks_grad_of_rows
from attn_dispatch.semantics.wider_arrays import padded_bytes

Operands = Mapping[str, jax.Array]
Results = tuple[jax.Array, ...]
"""The results of a call, in the order of its spec."""


def plan(spec: AttentionSpec, kernels: KernelSet) -> Plan:
    """The kernels' head dims, and the call's memory."""
    engine = f"head dim {kernels.head_dim}"
    if kernels.head_dim_v != kernels.head_dim:
        engine += f"/{kernels.head_dim_v}"
    if not has_intervals(spec):
        engine += ", mask of a bit a pair"
    query, key = (jax.ShapeDtypeStruct(spec.shape(x), spec.dtype) for x in ("query", "key"))
    scratch = interval_calls.scratch_bytes(kernels, query, key) if spec.is_backward else 0
    mask = data_bytes(spec) + lists_bytes(spec, tiles_of(kernels))[int(spec.is_backward)]
    return Plan(engine, scratch, mask + padded_bytes(spec, kernels.head_dim, kernels.head_dim_v))


def forward(spec: AttentionSpec, operands: Operands, given: MaskArrays, arch: str) -> Results:
    rows = given.rows
    out, lse = interval_calls.forward(
        scaled_query(spec, operands["query"]),
        operands["key"],  # a score in padding is masked, even NaN
        _cleared(operands["value"], None if spec.has_finite_padding else rows.real_keys),
        rows.mask,
        given.lists.arrays,
        positive_scale(spec),
        arch,
        _change(spec, operands),
        operands.get("sinks"),
    )
    if not each_query_attends(spec):
        # 0 · NaN is NaN, and a padding row's tile may hold a value that is NaN.
        flags = by_row(rows.attends)
        if rows.invalid is not None:
            flags = with_invalid(jnp.where(flags, REAL, PADDING), rows.invalid)
        out = cleared(out, flags)
    found = {"out": out}
    if spec.wanted.needs_lse:
        found |= nan_where(rows.invalid, {"lse": lse})
    return tuple(found.values())


def backward(spec: AttentionSpec, operands: Operands, given: MaskArrays, arch: str) -> Results:
    rows = given.rows
    real_queries = rows.attends if may_have_padding(spec) else None
    lse, lse_grad = operands["lse"], operands.get("lse_grad")
    if lse_grad is not None:
        # The gradient of a padding row's lse may be NaN.
        lse_grad = jnp.where(lse == -jnp.inf, 0, lse_grad)
    queries_before, keys_before = real_queries, rows.real_keys
    if spec.has_finite_padding:
        queries_before = keys_before = None
    # Rows of padding are 0 in out, but invalid ones are NaN.
    has_nan = may_be_invalid(spec) and not spec.meaning.finite_padding
    key, out_grad, query, out = cleared_together(
        (operands["key"], _by_row(keys_before)),
        (operands["out_grad"], _by_row(queries_before)),
        (scaled_query(spec, operands["query"]), _by_row(queries_before)),
        (operands["out"], _by_row(real_queries if has_nan else None)),
    )
    dq, dk, dv, products = interval_calls.backward(
        query,
        key,
        _cleared(operands["value"], keys_before),  # as in the forward pass: XLA does it once
        out,
        lse,
        out_grad,
        lse_grad,
        rows.mask,
        given.lists.arrays,
        positive_scale(spec),
        arch,
        _change(spec, operands),
    )
    dq, dk, dv = cleared_together(
        (scaled_query(spec, dq), _by_row(real_queries)),
        (dk, _by_row(rows.real_keys)),
        (dv, _by_row(rows.real_keys)),
    )
    gradients = {"query": dq, "key": dk, "value": dv}
    if "sinks" in spec.wanted.gradients:
        gradients["sinks"] = sinks_grad_of_rows(spec, operands, -products)
    return tuple(gradients[name] for name in spec.wanted.gradients)


def _change(spec: AttentionSpec, operands: Operands) -> Change:
    """The call's change of scores, with the arrays that it reads."""
    variant = score_change(spec)
    assert not isinstance(variant, Unsupported)  # or it would be a reason
    if variant is None:
        return interval_calls.NO_CHANGE
    return Change(variant.digest, tuple(operands[x] for x in variant.arrays))


def _cleared(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """x [B, L, heads, D] with 0 in padding rows; `real` is bool [1|B, 1|heads, L]."""
    return cleared_together((x, _by_row(real)))[0]


def _by_row(real: jax.Array | None) -> jax.Array | None:
    return None if real is None else by_row(real)


def by_row(real: jax.Array) -> jax.Array:
    """[1|B, L] of [1|B, 1, L], or [1|B, L, heads] of [1|B, heads, L]."""
    return real[:, 0] if real.shape[1] == 1 else real.swapaxes(1, 2)
