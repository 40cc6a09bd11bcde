"""Ragged queries on pages as two padded calls: one of single queries, one of blocks of queries.

A batch padded to its longest sequence computes its padding too, and a server's steps are mostly
padding: many single queries beside a chunk of a prompt. So the sequences with one query become a
batch of single queries, as in decoding, and the queries of the others are cut into blocks. Each
block is a batch row, with the page table of its sequence and the keys up to the last one that its
last query sees, so that bottom-right causality is that of the whole sequence. The number of tokens
bounds the number of blocks; unused blocks have no keys and cost a kernel nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.ragged_queries import RaggedQueries

MIN_BLOCK_SIZE = 32
_TILE = 128
"""Rows of a kernel's tile: queries times the query heads that share a kv head."""

MAX_UNCUT_QUERIES = 16
"""Sequences of so many queries or fewer are padded: kernels take them as heads of one query."""


def fits_query_blocks(spec: AttentionSpec) -> bool:
    """Whether a padded call of ragged queries may be computed as these two calls.

    A block keeps the diagonal of its sequence only if the diagonal ends at the last key that its
    last query sees, or if nothing depends on it. Mods count queries and batch rows from the first,
    so they are excluded.
    """
    if spec.seq_len_q <= MAX_UNCUT_QUERIES or spec.batch == 1 or spec.is_empty or spec.meaning.mods:
        return False
    if spec.has("window"):
        return False
    is_open = spec.band == (None, None) and not spec.has("alibi_slopes")
    return is_open or spec.band[1] == 0


def block_size(spec: AttentionSpec) -> int:
    """The number of queries in a block.

    63 single queries beside a chunk of 512 take 497 µs in blocks of 32, 513 µs in blocks of 64 and
    548 µs in blocks of 128, and 1,877 µs with all keys gathered (64 rows of 4,096 keys, 32 heads on
    8 kv heads, 128 dims, H200, cuDNN 9.19). 15 single queries beside a chunk of 2,048 take 805,
    1,115 and 871 µs, and 1,438 µs gathered.
    """
    return max(MIN_BLOCK_SIZE, _TILE * spec.num_kv_heads // spec.num_heads)


@dataclass(frozen=True)
class QueryBlocks:
    """The blocks of queries. A row is a sequence."""

    ragged: RaggedQueries
    row: jax.Array
    """int32 [blocks]: the block's row; unspecified where `count` is 0."""
    first: jax.Array
    """int32 [blocks]: the block's first query, counted inside the row."""
    count: jax.Array
    """int32 [blocks]: the block's number of queries."""
    first_block: jax.Array
    """int32 [B]: the row's first block."""
    is_single: jax.Array
    """bool [B]: the row has one query."""
    size: int

    @staticmethod
    def of(ragged: RaggedQueries, size: int) -> QueryBlocks:
        """Blocks of up to `size` queries, for all rows that have several queries."""
        rows, tokens = ragged.lengths.shape[0], ragged.sequence.shape[0]
        most_rows = min(rows, tokens // 2)
        number = most_rows + (tokens - most_rows) // size
        lengths = jnp.maximum(ragged.lengths, 0)
        blocks = jnp.where(lengths > 1, -(-lengths // size), 0)
        ends = jnp.cumsum(blocks, dtype=jnp.int32)
        block = jnp.arange(number, dtype=jnp.int32)
        row = (ends[None] <= block[:, None]).sum(axis=1, dtype=jnp.int32)
        is_used, row = row < rows, jnp.minimum(row, rows - 1)
        first = (block - (ends - blocks)[row]) * size
        count = jnp.where(is_used, jnp.clip(lengths[row] - first, 0, size), 0)
        first = jnp.where(is_used, first, 0)
        return QueryBlocks(ragged, row, first, count, ends - blocks, lengths == 1, size)

    def calls(
        self, arguments: Arguments, is_invalid: jax.Array, *, is_causal: bool
    ) -> tuple[Arguments, Arguments]:
        """The arguments of the call of single queries and of the call of blocks.

        Args:
          arguments: the ragged call's, without cu_seqlens_q and max_seqlen_q.
          is_invalid: bool [B], the rows whose results are NaN; their keys are not read.
          is_causal: whether queries of a row see different keys.
        """
        query, table = jnp.asarray(arguments.query), jnp.asarray(arguments.page_table)
        keys = jnp.where(is_invalid, 0, jnp.asarray(arguments.key_value_seq_lengths))
        single = replace(
            arguments,
            query=jnp.take(query, self.ragged.starts[:, None], axis=0, mode="clip"),
            key_value_seq_lengths=jnp.where(self.is_single, keys, 0),
        )
        places = (self.ragged.starts[self.row] + self.first)[:, None] + jnp.arange(self.size)
        block_queries = jnp.take(query, places, axis=0, mode="clip")
        block_table = table[self.row]
        seen = keys[self.row]
        if is_causal:
            seen -= self.ragged.lengths[self.row] - self.first - self.count
        is_computed = (self.count > 0) & ~is_invalid[self.row]
        blocks = replace(
            arguments,
            query=block_queries,
            page_table=block_table,
            key_value_seq_lengths=jnp.where(is_computed, jnp.maximum(seen, 0), 0),
            query_seq_lengths=self.count,
            alibi_slopes=self._by_row(arguments.alibi_slopes),
            sinks=self._by_row(arguments.sinks),
        )
        return single, blocks

    def _by_row(self, x: ArrayLike | None) -> ArrayLike | None:
        """[N], or [B, N] as that of each block's row."""
        return x if x is None or jnp.ndim(x) < 2 else jnp.asarray(x)[self.row]

    def packed(
        self, single: jax.Array, blocks: jax.Array, is_invalid: jax.Array, padding: float
    ) -> jax.Array:
        """The results of both calls as [tokens, ...].

        Args:
          single: [B, 1, ...], the results of the call of single queries.
          blocks: [blocks, size, ...], the results of the call of blocks.
          is_invalid: bool [B], the rows whose results are NaN.
          padding: the value for tokens of no sequence, 0 or -inf.
        """
        tokens = jnp.arange(self.ragged.sequence.shape[0], dtype=jnp.int32)
        row = jnp.maximum(self.ragged.sequence, 0)
        within = jnp.maximum(tokens - self.ragged.starts[row], 0)
        block = jnp.minimum(self.first_block[row] + within // self.size, blocks.shape[0] - 1)

        def each(of_tokens: jax.Array) -> jax.Array:
            return of_tokens.reshape(-1, *(1,) * (blocks.ndim - 2))

        found = jnp.where(
            each(self.is_single[row]), single[row, 0], blocks[block, within % self.size]
        )
        found = jnp.where(each(is_invalid[row]), jnp.asarray(jnp.nan, found.dtype), found)
        has_sequence = each(self.ragged.sequence >= 0)
        return jnp.where(has_sequence, found, jnp.asarray(padding, found.dtype))
