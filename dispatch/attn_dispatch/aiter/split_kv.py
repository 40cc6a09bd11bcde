"""Calls of CK's split-KV kernels: few queries beside a cache, or keys and values in pages.

Such a kernel reads the keys of a row up to its length and nothing beyond. Of the last page it makes
a view that ends there (fmha_fwd_splitkv_kernel.hpp, page_block_navigator.hpp): value is 0 past its
end, scores are replaced by -inf, and no further entry of the table is looked up. So nothing of
key and value is cleared here, and NaN past a length reaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.aiter.arrays import KernelArrays, slopes_of_rows
from attn_dispatch.aiter.call import AiterCall, folds_heads
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.padding import pad_last
from attn_dispatch.semantics.pages import flat_pages, flat_table
from attn_dispatch.semantics.row_ids import row_lengths
from attn_dispatch.semantics.scaled_query import scaled_query


def split_inputs(
    spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array]
) -> KernelArrays:
    """The operands, in the order of rocm_backend/fill_split_kv.cc."""
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
    """out [B, T, N, V] and lse [B, N, T], if there is one, of the kernel's results."""
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
    # Where the caller had them with heads first, XLA drops this and what it undoes.
    return jnp.swapaxes(x, 1, 2) if call.heads_first_kv else x


def _heads_first(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """[B, T, N, ·] as [B, N, T, ·], or where heads are folded as [B, K, T · N / K, ·]."""
    if not folds_heads(spec):
        return jnp.swapaxes(x, 1, 2)
    by_group = x.reshape(*x.shape[:2], spec.num_kv_heads, -1, x.shape[3])
    return jnp.moveaxis(by_group, 2, 1).reshape(spec.batch, spec.num_kv_heads, -1, x.shape[3])


def _from_heads_first(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """[B, T, N, ·] of what `_heads_first` makes."""
    if not folds_heads(spec):
        return jnp.swapaxes(x, 1, 2)
    by_group = x.reshape(spec.batch, spec.num_kv_heads, spec.seq_len_q, -1, x.shape[3])
    return jnp.moveaxis(by_group, 1, 2).reshape(spec.batch, spec.seq_len_q, -1, x.shape[3])


def _shift(
    spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array]
) -> jax.Array | None:
    """How far the queries of each row [B] must go, for the last one to be the row's last.

    The diagonal ends there, and the kernel knows of no lengths of queries. None where that makes no
    difference.
    """
    is_apart = call.mask == "bottom_right" and spec.seq_len_q > 1
    if not (is_apart and spec.has("query_seq_lengths")):
        return None
    return spec.seq_len_q - row_lengths(spec, operands, "query")


def _moved(x: jax.Array, by: jax.Array, axis: int) -> jax.Array:
    """Along an axis that has what lies `by` [B] further on, around its end."""
    size = x.shape[axis]
    places = (jnp.arange(size, dtype=jnp.int32)[None] + by[:, None]) % size
    shape = [1] * x.ndim
    shape[0], shape[axis] = x.shape[0], size
    return jnp.take_along_axis(x, places.reshape(shape), axis=axis)
