"""The arguments that paged calls alone have, brought to those that all calls have.

Queries of sequences that lie one after the other become a padded batch of them, and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.static_arguments import check_positive_int
from attn_dispatch.call.values import as_int32, check_cu_seqlens_q
from attn_dispatch.semantics.row_ids import ascending, search


@dataclass(frozen=True)
class RaggedQueries:
    """Where the queries of each sequence stand among all of them."""

    starts: jax.Array
    """int32 [B]."""
    lengths: jax.Array
    """int32 [B]; -1, which is wrong and makes NaN, where cu_seqlens are."""
    sequence: jax.Array
    """int32 [tokens], from 0; -1 for what belongs to none."""
    longest: int

    @staticmethod
    def of(cu_seqlens: jax.Array, tokens: int, longest: int) -> RaggedQueries:
        """Of cu_seqlens [B + 1] int32 that ascend from 0 to at most `tokens`."""
        right = ascending(cu_seqlens[None], tokens)[0]
        is_wrong = (right != cu_seqlens).any() | (cu_seqlens[0] != 0)
        lengths = jnp.diff(right)
        wrong = is_wrong | (lengths > longest)
        places = jnp.arange(tokens, dtype=jnp.int32)[None]
        index = search(right[None], places, "right")[0] - 1
        is_of_one = index < right.shape[0] - 1
        # All queries are a sequence's where nobody knows which: they are to be NaN.
        sequence = jnp.where(is_of_one & (index >= 0), index, jnp.where(is_wrong, 0, -1))
        return RaggedQueries(right[:-1], jnp.where(wrong, -1, lengths), sequence, longest)

    def padded(self, x: jax.Array) -> jax.Array:
        """[tokens, ...] as [B, longest, ...]; what is padding is anything."""
        places = self.starts[:, None] + jnp.arange(self.longest, dtype=jnp.int32)
        return jnp.take(x, places, axis=0, mode="clip")

    def packed(self, x: jax.Array, padding: float) -> jax.Array:
        """[B, longest, ...] as [tokens, ...], `padding` where no sequence is."""
        sequence = jnp.maximum(self.sequence, 0)
        tokens = jnp.arange(self.sequence.shape[0], dtype=jnp.int32)
        within = jnp.clip(tokens - self.starts[sequence], 0, self.longest - 1)
        found = x[sequence, within]
        is_of_one = (self.sequence >= 0).reshape(-1, *(1,) * (found.ndim - 1))
        return jnp.where(is_of_one, found, jnp.asarray(padding, x.dtype))


def ragged_queries(
    arguments: Mapping[str, Any], cu_seqlens_q: ArrayLike, max_seqlen_q: int | None
) -> RaggedQueries:
    """Of a paged call's arguments with cu_seqlens_q.

    Raises:
      ValueError: with expected and got.
    """
    if arguments["query_seq_lengths"] is not None:
        raise ValueError("query_seq_lengths: expected None beside cu_seqlens_q, got an array")
    shape, table = jnp.shape(arguments["query"]), jnp.shape(arguments["page_table"])
    if len(shape) != 3:
        raise ValueError(f"query: expected [tokens, N, H] with cu_seqlens_q, got {list(shape)}")
    cu_seqlens, rows = jnp.asarray(cu_seqlens_q), table[0] if table else 0
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer) or cu_seqlens.shape != (rows + 1,):
        raise ValueError(
            f"cu_seqlens_q: expected integers [{rows + 1}], one more than page_table has rows, got "
            f"{cu_seqlens.dtype.name}{list(cu_seqlens.shape)}"
        )
    tokens = shape[0]
    longest = tokens if max_seqlen_q is None else check_positive_int("max_seqlen_q", max_seqlen_q)
    check_cu_seqlens_q(cu_seqlens_q, tokens, longest)
    longest = max(min(longest, tokens), 1)
    return RaggedQueries.of(as_int32(cu_seqlens), tokens, longest)


def cut_table(page_table: ArrayLike, key_pages: ArrayLike, max_seqlen_kv: int) -> ArrayLike:
    """The columns of a page table that so many keys need.

    Raises:
      ValueError: there are not as many.
    """
    longest, shape = check_positive_int("max_seqlen_kv", max_seqlen_kv), jnp.shape(page_table)
    pages = jnp.shape(key_pages)
    if len(shape) != 2 or len(pages) != 4 or not pages[1]:
        return page_table  # what is wrong with them is said elsewhere
    columns = -(-longest // pages[1])
    if columns > shape[1]:
        raise ValueError(
            f"max_seqlen_kv: expected at most {shape[1] * pages[1]}, which page_table "
            f"{list(shape)} has room for with pages of {pages[1]}, got {longest}"
        )
    return jnp.asarray(page_table)[:, :columns]
