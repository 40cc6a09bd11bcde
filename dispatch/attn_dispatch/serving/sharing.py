"""Sequences that begin with pages of others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from attn_dispatch.serving.tables import NO_PAGE, PageTables, counted, cut, grow, unless


def share_prefix(
    tables: PageTables, source: ArrayLike, target: ArrayLike, tokens: ArrayLike
) -> PageTables:
    """Begin a sequence with the full pages of another that hold its first keys.

    The target then has `tokens` rounded down to whole pages; the rest is the caller's to write.
    Pages that `free_behind` has given back in the source are not there in the target either: keep
    a prefix in a slot where none are.

    Args:
      tables: the state.
      source: a slot, integer [].
      target: another slot, whose sequence, if it has one, ends.
      tokens: integer []: how many keys the two have in common; of more than the source has, all.

    Raises:
      ValueError: these are no two slots, or tokens are below 0. In traced code nothing is raised of
        values, nothing changes, and `failed` is True from then on.
    """
    is_impossible = _check_pair(tables, source, target, tokens)
    before, tables = tables, cut(tables, tables.lengths.at[target].set(0))
    length = jnp.minimum(jnp.asarray(tokens, jnp.int32), tables.lengths[source])
    pages = length // tables.page_size
    is_shared = jnp.arange(tables.table.shape[1]) < pages
    row = jnp.where(is_shared, tables.table[source], NO_PAGE)
    shared = replace(
        tables,
        table=tables.table.at[target].set(row),
        lengths=tables.lengths.at[target].set(pages * tables.page_size),
        references=counted(tables.references, row, is_shared, 1),
    )
    return unless(is_impossible, before, shared)


def fork(
    tables: PageTables, source: ArrayLike, target: ArrayLike
) -> tuple[PageTables, jax.Array, jax.Array]:
    """Let a second sequence go on from where one is, to sample another continuation.

    Full pages are shared. The last one, if it is not full, is the target's own, and must be copied:
    `copy_pages(pages, from_page, to_page)` for each array of pages.

    Args:
      tables: the state.
      source: the slot of the sequence that is there.
      target: another slot, whose sequence, if it has one, ends.

    Returns:
      The state, and the pages to copy from and to, int32 []: the same one where there is nothing to
      copy.

    Raises:
      OutOfPages: as for `grow`.
      ValueError: as for `share_prefix`.
    """
    _check_pair(tables, source, target, 0)
    length = tables.lengths[source]
    shared = share_prefix(replace(tables, failed=jnp.zeros((), bool)), source, target, length)
    rest = length - shared.lengths[target]
    grown = grow(shared, jnp.zeros_like(tables.lengths).at[target].set(rest))
    failed, grown = grown.failed, unless(grown.failed, tables, grown)
    last = jnp.maximum(tables.pages_of(length) - 1, 0)
    from_page, to_page = (jnp.maximum(grown.table[x, last], 0) for x in (source, target))
    is_copied = (rest > 0) & ~failed
    grown = replace(grown, failed=failed | tables.failed)
    return grown, from_page, jnp.where(is_copied, to_page, from_page)


def _check_pair(
    tables: PageTables, source: ArrayLike, target: ArrayLike, tokens: ArrayLike
) -> jax.Array:
    """bool []: these are no two slots, or no number of tokens; raises where values are known."""
    for name, x in (("source", source), ("target", target), ("tokens", tokens)):
        array = jnp.asarray(x)
        if array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
            got = f"{array.dtype.name}{list(array.shape)}"
            raise ValueError(f"{name}: expected an integer [], got {got}")
    pair, slots = jnp.stack([jnp.asarray(source), jnp.asarray(target)]), tables.lengths.shape[0]
    is_wrong = ((pair < 0) | (pair >= slots)).any() | (pair[0] == pair[1])
    is_negative = jnp.asarray(tokens) < 0
    if not isinstance(is_wrong, Tracer) and is_wrong:
        raise ValueError(
            f"source, target: expected two slots from 0 to {slots - 1}, got {int(pair[0])} and "
            f"{int(pair[1])}"
        )
    if not isinstance(is_negative, Tracer) and is_negative:
        raise ValueError(f"tokens: expected 0 or more, got {int(jnp.asarray(tokens))}")
    return is_wrong | is_negative
