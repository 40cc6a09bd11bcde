"""A case as a call of `paged_attention` with cu_seqlens_q, whose queries are packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.static_arguments import OwnName
from attn_dispatch.paged import paged_attention
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.in_pages import in_pages

_UNUSED = 3
"""The number of tokens after the last sequence."""


def ragged(
    case: Case, options: AttentionOptions
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """The forward call as a function of padded operands, with padded results.

    If `out` is not 0, or lse not -inf, at tokens after the last sequence, that whole result is NaN.
    """
    assert case.q_lengths is not None
    rows = np.repeat(np.arange(case.b), case.q_lengths)
    within = np.concatenate([np.arange(x) for x in (*case.q_lengths, 0)])

    def call(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        given = in_pages(case, arrays)
        query = arrays["query"][rows, within]
        query = jnp.pad(query, ((0, _UNUSED), (0, 0), (0, 0)), constant_values=jnp.nan)
        ends = jnp.cumsum(arrays["query_seq_lengths"])
        by_head: dict[str, Any] = {
            name: x[0] if x.shape[0] == 1 else x
            for name, x in arrays.items()
            if name in ("alibi_slopes", "sinks")
        }
        found = paged_attention(
            query,
            **_pages(case, given),
            key_value_seq_lengths=given["key_value_seq_lengths"],
            cu_seqlens_q=jnp.concatenate([jnp.zeros_like(ends[:1]), ends]),
            max_seqlen_q=case.t,
            scale=case.scale,
            is_causal=case.is_causal,
            local_window_size=None if case.window == (None, None) else case.window,
            logits_soft_cap=case.soft_cap,
            implementation=tuple(OwnName(x) for x in options.meaning.implementation) or None,
            return_lse=True,
            **by_head,
        )
        keys, results = arrays["key_value_seq_lengths"], {}
        is_invalid = (keys < 0) | (keys > case.s)
        for name, x, padding in zip(("out", "lse"), found, (0, -jnp.inf), strict=True):
            # Places without a token are as in the padded call: NaN in an invalid row.
            padded = jnp.where(is_invalid, jnp.nan, jnp.asarray(padding, x.dtype))
            padded = jnp.broadcast_to(
                padded.reshape(case.b, *(1,) * x.ndim), (case.b, case.t, *x.shape[1:])
            )
            padded = padded.at[rows, within].set(x[: len(rows)])
            is_right = (x[len(rows) :] == padding).all()
            results[name] = jnp.where(is_right, padded, jnp.nan)
        results["lse"] = jnp.swapaxes(results["lse"], 1, 2)
        return results if options.wanted.needs_lse else {"out": results["out"]}

    return call


def _pages(case: Case, given: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The pages and the table as arguments of the public call, in the case's layout."""
    keys, values, table = given["key_pages"][0], given["value_pages"][0], given["page_table"]
    order = {}
    if "kv" in case.heads_first.split():
        keys, values = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
        order = {"kv_layout": "HND"}
    if case.one_pool:  # the table counts pages of keys, each before the page of its values
        keys, values, table = keys.reshape(-1, 2, *keys.shape[1:]), None, table // 2
    return {"key_pages": keys, "value_pages": values, "page_table": table, **order}
