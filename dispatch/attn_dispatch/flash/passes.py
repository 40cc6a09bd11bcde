"""FlashAttention's forward and backward pass.

They convert a call's operands to a kernel's arrays, and the kernel's results to the call's. Kernels
multiply whole tiles, in which 0 · NaN is NaN. So padding becomes 0, and a packed array of several
batch rows has a tile of zeros between them, so that NaN in one reaches no other.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.clear_rows import cleared_together, ends_cleared
from attn_dispatch.flash import kernels
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.flash.sequences import Sequences
from attn_dispatch.semantics.invalid_values import nan_where
from attn_dispatch.semantics.lse_grad import with_lse_grad
from attn_dispatch.semantics.real_rows import each_query_attends
from attn_dispatch.semantics.row_flags import cleared_by_xla, flags_of
from attn_dispatch.semantics.scaled_query import positive_scale, scaled_query
from attn_dispatch.semantics.wider_arrays import pad_last, padded_bytes

Results = tuple[jax.Array, ...]
"""The results of a call, in the order of its spec."""


def copies_bytes(spec: AttentionSpec, call: FlashCall) -> int:
    """Bytes of copies of arrays and gradients, for padded head dims or gaps between batch rows."""
    if not call.gap:
        return padded_bytes(spec, call.head_dim, call.head_dim)
    queries, keys = call.rows_q * call.num_heads, call.rows_kv * call.num_kv_heads
    times = 2 if call.backward else 1
    return 4 * times * (queries + keys) * call.head_dim


def forward(spec: AttentionSpec, call: FlashCall, operands: Mapping[str, jax.Array]) -> Results:
    sequences = Sequences.of(spec, call, operands)
    real = sequences.real_queries
    qkv = to_kernel(
        call,
        # A score in padding is masked, even NaN: only value can carry NaN from there.
        (scaled_query(spec, operands["query"]), None),
        (operands["key"], None),
        (operands["value"], None if spec.has_finite_padding else sequences.real_keys),
        head_dim=call.head_dim,
    )
    out, lse = kernels.forward(call, qkv, sequences.offsets, positive_scale(spec))
    if call.is_end_to_end:
        kept = lse if spec.wanted.needs_lse else None
        out, *kept = ends_cleared(sequences.offsets[0], [out], kept, invalid_is_nan=True)
        lse = kept[0] if kept else lse
    flags = None if real is None else flags_of(real, sequences.invalid)
    (out,) = from_kernel(call, (out, flags))
    found = {"out": out[..., : spec.head_dim_v]}
    if spec.wanted.needs_lse:
        lse = lse_from_kernel(call, lse)
        if real is not None:
            lse = jnp.where(real[:, None, :], lse, -jnp.inf)
        found |= nan_where(sequences.invalid, {"lse": lse})
    return tuple(found.values())


def backward(spec: AttentionSpec, call: FlashCall, operands: Mapping[str, jax.Array]) -> Results:
    sequences = Sequences.of(spec, call, operands)
    of_queries, of_keys = sequences.real_queries, sequences.real_keys
    out, out_grad = operands["out"], operands["out_grad"]
    if spec.has("lse_grad"):
        out, out_grad = with_lse_grad(out, out_grad, operands["lse"], operands["lse_grad"])
    lse = operands["lse"]
    if not call.is_end_to_end and not each_query_attends(spec):
        # exp(-inf - lse) must be 0, however the kernel treats an lse of -inf.
        lse = jnp.where(lse == -jnp.inf, 0, lse)
    query = scaled_query(spec, operands["query"])
    queries_before, keys_before = of_queries, of_keys
    if spec.has_finite_padding:
        queries_before = keys_before = None
    key, out_grad, query, out = to_kernel(
        call,
        (operands["key"], keys_before),
        (out_grad, queries_before),
        (query, queries_before),
        (out, None),
        head_dim=call.head_dim,
    )
    # Apart, as in the forward pass: XLA does it once.
    (value,) = to_kernel(call, (operands["value"], keys_before), head_dim=call.head_dim)
    arrays = (out_grad, query, key, value, out, lse_to_kernel(call, lse))
    found = kernels.backward(call, arrays, sequences.offsets, positive_scale(spec))
    if call.is_end_to_end:
        found = ends_cleared(sequences.offsets[0], found, None, invalid_is_nan=False)
    flags = (of_queries, of_keys, of_keys)
    dq, dk, dv = from_kernel(call, *zip(found, flags, strict=True))
    gradients = {
        "query": scaled_query(spec, dq[..., : spec.head_dim]),
        "key": dk[..., : spec.head_dim],
        "value": dv[..., : spec.head_dim_v],
    }
    return tuple(gradients[name] for name in spec.wanted.gradients)


Rows = tuple[jax.Array, jax.Array | None]
"""An array and its rows' flags [1|B, L]; None if none are to be cleared."""


def to_kernel(call: FlashCall, *arrays: Rows, head_dim: int) -> list[jax.Array]:
    """Arrays [B, L, heads, D] with the kernels' head dim, and 0 in rows that are not real.

    With a single batch row, they are cleared in place if nothing else reads them, as in training.
    """
    if call.is_packed and not call.gap:
        return cleared_together(*(_flat(pad_last(x, head_dim), flags) for x, flags in arrays))
    return [_in_own_tiles(call, pad_last(x, head_dim), flags) for x, flags in arrays]


def from_kernel(call: FlashCall, *arrays: Rows) -> list[jax.Array]:
    """A kernel's results as [B, L, heads, D], cleared according to their rows' flags."""
    if call.is_packed and not call.gap:
        found = cleared_together(*((x, _one_axis(flags)) for x, flags in arrays))
        return [x.reshape(1, *x.shape) for x in found]
    return [_from_own_tiles(call, x, flags) for x, flags in arrays]


def _flat(x: jax.Array, flags: jax.Array | None) -> Rows:
    return x.reshape(-1, *x.shape[2:]), _one_axis(flags)


def _one_axis(flags: jax.Array | None) -> jax.Array | None:
    return None if flags is None else flags.reshape(-1)


def _in_own_tiles(call: FlashCall, x: jax.Array, flags: jax.Array | None) -> jax.Array:
    """x cleared; packed, with the gap after each batch row."""
    x = x if flags is None else cleared_by_xla(x, flags)
    if not call.is_packed:
        return x
    return jnp.pad(x, ((0, 0), (0, call.gap), (0, 0), (0, 0))).reshape(-1, *x.shape[2:])


def _from_own_tiles(call: FlashCall, x: jax.Array, flags: jax.Array | None) -> jax.Array:
    if call.is_packed:
        x = x.reshape(call.batch, -1, *x.shape[1:])
        x = x[:, : x.shape[1] - call.gap]
    return x if flags is None else cleared_by_xla(x, flags)


def lse_to_kernel(call: FlashCall, lse: jax.Array) -> jax.Array:
    """lse [B, N, T] as the kernels take it; packed, that is [N, rows]."""
    if not call.is_packed:
        return lse
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, call.gap)))
    return jnp.swapaxes(lse, 0, 1).reshape(call.num_heads, -1)


def lse_from_kernel(call: FlashCall, lse: jax.Array) -> jax.Array:
    """A kernel's lse, packed [N, rows], as [B, N, T]."""
    if not call.is_packed:
        return lse
    lse = jnp.swapaxes(lse.reshape(call.num_heads, call.batch, -1), 0, 1)
    return lse[..., : lse.shape[2] - call.gap]
