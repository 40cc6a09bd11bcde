"""The checks of arguments that only paged calls have."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.static_arguments import check_positive_int
from attn_dispatch.call.values import as_int32, check_cu_seqlens_q


def check_ragged(arguments: Arguments, cu_seqlens_q: ArrayLike) -> tuple[jax.Array, int]:
    """cu_seqlens_q [B + 1] int32 of a paged call, and the largest number of queries of a sequence.

    Raises:
      ValueError: if an argument is wrong; the message has what was expected and what was given.
    """
    if arguments.query_seq_lengths is not None:
        raise ValueError("query_seq_lengths: expected None beside cu_seqlens_q, got an array")
    shape, table = _shape(arguments.query), _shape(arguments.page_table)
    if len(shape) != 3:
        raise ValueError(f"query: expected [tokens, N, H] with cu_seqlens_q, got {list(shape)}")
    cu_seqlens, rows = jnp.asarray(cu_seqlens_q), table[0] if table else 0
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer) or cu_seqlens.shape != (rows + 1,):
        raise ValueError(
            f"cu_seqlens_q: expected integers [{rows + 1}], one more than page_table has rows, got "
            f"{cu_seqlens.dtype.name}{list(cu_seqlens.shape)}"
        )
    tokens = shape[0]
    longest = tokens
    if arguments.max_seqlen_q is not None:
        longest = check_positive_int("max_seqlen_q", arguments.max_seqlen_q)
    check_cu_seqlens_q(cu_seqlens_q, tokens, longest)
    longest = max(min(longest, tokens), 1)
    return as_int32(cu_seqlens), longest


def first_of_both(page_table: jax.Array, pages: int) -> jax.Array:
    """The page table of a pool of 2 · P pages, where the values of a page of keys are in the next.

    Numbers that are no pages stay outside the pool, and do not overflow.
    """
    return 2 * jnp.clip(page_table, -1, pages // 2)


def with_cut_table(arguments: Arguments) -> Arguments:
    """The arguments with the page table cut to the columns that max_seqlen_kv keys need, if given.

    Raises:
      ValueError: the table has fewer columns.
    """
    if arguments.max_seqlen_kv is None:
        return arguments
    longest = check_positive_int("max_seqlen_kv", arguments.max_seqlen_kv)
    arguments = replace(arguments, max_seqlen_kv=None)
    table, shape, pages = (
        arguments.page_table,
        _shape(arguments.page_table),
        _shape(arguments.key_pages),
    )
    if table is None or len(shape) != 2 or len(pages) != 4 or not pages[1]:
        return arguments  # wrong shapes are refused later
    columns = -(-longest // pages[1])
    if columns > shape[1]:
        raise ValueError(
            f"max_seqlen_kv: expected at most {shape[1] * pages[1]}, which page_table "
            f"{list(shape)} has room for with pages of {pages[1]}, got {longest}"
        )
    return replace(arguments, page_table=jnp.asarray(table)[:, :columns])


def _shape(x: ArrayLike | None) -> tuple[int, ...]:
    return () if x is None else jnp.shape(x)
