"""Calls of CK's split-KV kernels: few queries and a cache, or keys and values in pages.

Such a kernel reads the keys of a row up to its length and nothing beyond. Its view of the last page
ends there (fmha_fwd_splitkv_kernel.hpp, page_block_navigator.hpp): past the end value is 0, scores
are replaced by -inf, and no further entry of the page table is read. So key and value need no
clearing: NaN past a length reaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.aiter.arrays import KernelArrays, slopes_of_rows
from attn_dispatch.aiter.call import AiterCall, folds_heads
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.given_ids import row_lengths
from attn_dispatch.semantics.pages import flat_pages, flat_table
from attn_dispatch.semantics.scaled_query import scaled_query
from attn_dispatch.semantics.wider_arrays import pad_last


def split_inputs(
    spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array]
) -> KernelArrays:
    """The operands of the custom call, in the order of rocm_backend/call_structs_split_kv.cc."""
    query = scaled_query(spec, pad_last(operands["query"], call.head_dim))
    if (shift := _shift(spec, call, operands)) is not None:
        query = _moved(query, -shift, 1)
    key, value = (_keys(spec, call, operands, x) for x in ("key", "value"))
    arrays = {
        "q": _heads_first(spec, query),
        "k": pad_last(key, call.head_dim),
        "v": pad_last(value, call.head_dim_v),
    }
    if call.bias == "alibi":
        arrays["bias"] = slopes_of_rows(operands["alibi_slopes"], call.batch)
    arrays["seqlen_k"] = row_lengths(spec, operands, "key")
    if spec.is_paged:
        arrays["page_table"] = flat_table(spec, operands)
    return arrays


def split_outputs(
    spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array], results: KernelArrays
) -> tuple[jax.Array, jax.Array | None]:
    """out [B, T, N, V] and lse [B, N, T], if it is wanted, from the kernel's results."""
    out = _from_heads_first(spec, results["out"])[..., : spec.head_dim_v]
    lse = None
    if "lse" in results:
        lse = _from_heads_first(spec, results["lse"][..., None])[..., 0]
    if (shift := _shift(spec, call, operands)) is not None:
        out = _moved(out, shift, 1)
        lse = None if lse is None else _moved(lse, shift, 1)
    return out, None if lse is None else jnp.swapaxes(lse, 1, 2)


def _keys(
    spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array], name: str
) -> jax.Array:
    x = flat_pages(operands[f"{name}_pages"]) if spec.is_paged else operands[name]
    # If the caller's array has heads first, XLA cancels this transpose with the one that made x.
    return jnp.swapaxes(x, 1, 2) if call.heads_first_kv else x


def _heads_first(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """x [B, T, N, ·] as [B, N, T, ·]; with folded heads, as [B, K, T · N / K, ·]."""
    if not folds_heads(spec):
        return jnp.swapaxes(x, 1, 2)
    by_group = x.reshape(*x.shape[:2], spec.num_kv_heads, -1, x.shape[3])
    return jnp.moveaxis(by_group, 2, 1).reshape(spec.batch, spec.num_kv_heads, -1, x.shape[3])


def _from_heads_first(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """The inverse of `_heads_first`: [B, T, N, ·]."""
    if not folds_heads(spec):
        return jnp.swapaxes(x, 1, 2)
    by_group = x.reshape(spec.batch, spec.num_kv_heads, spec.seq_len_q, -1, x.shape[3])
    return jnp.moveaxis(by_group, 1, 2).reshape(spec.batch, spec.seq_len_q, -1, x.shape[3])


def _shift(
    spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array]
) -> jax.Array | None:
    """By how many places each row's queries must move, [B], so that its last query comes last.

    The diagonal ends at the last place, and the kernel takes no lengths of queries. None if the
    result does not depend on it.
    """
    depends_on_place = call.mask == "bottom_right" and spec.seq_len_q > 1
    if not (depends_on_place and spec.has("query_seq_lengths")):
        return None
    return spec.seq_len_q - row_lengths(spec, operands, "query")


def _moved(x: jax.Array, by: jax.Array, axis: int) -> jax.Array:
    """x rotated along an axis by `by` [B] places: place i gets the value of place i + by."""
    size = x.shape[axis]
    places = (jnp.arange(size, dtype=jnp.int32)[None] + by[:, None]) % size
    shape = [1] * x.ndim
    shape[0], shape[axis] = x.shape[0], size
    return jnp.take_along_axis(x, places.reshape(shape), axis=axis)
