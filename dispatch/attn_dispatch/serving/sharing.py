"""Sequences that share their first pages with others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.serving.reordering import reorder
from attn_dispatch.serving.tables import (
    NO_PAGE,
    PageTables,
    check_type,
    raise_if_known_unusable,
    unchanged_if_failed,
    with_count_changed,
    with_lengths,
)
from attn_dispatch.typed_jax import is_tracer

_NO_SLOT = -2
"""A wrong parent, with which `reorder` fails."""


def share_prefix(
    tables: PageTables, source: ArrayLike, target: ArrayLike, tokens: ArrayLike
) -> PageTables:
    """Begin a sequence with another's first keys, by sharing the full pages that hold them.

    The target then has `tokens` keys, rounded down to whole pages; write the rest yourself. Pages
    of the source that `free_behind` has freed are missing in the target too, but the last one must
    exist: keep a prefix in a slot whose pages are never freed.

    Args:
      tables: the state.
      source: a slot, integer [].
      target: another slot; its sequence, if it has one, ends.
      tokens: integer []: the number of first keys to share; at most the source's length.

    Raises:
      OutOfPages: tables have failed before.
      ValueError: tables as for `grow`; source and target are not two slots, tokens are below 0, or
        the prefix ends in a page that was freed. In traced code invalid values raise nothing:
        nothing changes, and `failed` is True from then on.
    """
    is_moved = raise_if_known_unusable(tables)
    is_impossible = is_moved | _check_pair(tables, source, target, tokens)
    pages = _whole_pages(tables, source, tokens)
    is_gone = (pages > 0) & (tables.table[source, jnp.maximum(pages - 1, 0)] < 0)
    if not is_tracer(is_gone) and is_gone:
        raise ValueError(
            f"tokens: expected a prefix whose last page slot {int(jnp.asarray(source))} has, got "
            f"{int(jnp.asarray(tokens))}: that page was given back behind a window"
        )
    return unchanged_if_failed(
        is_impossible | is_gone, tables, _shared(tables, source, target, pages)
    )


def _whole_pages(tables: PageTables, source: ArrayLike, tokens: ArrayLike) -> jax.Array:
    """int32 []: the number of full pages in the first `tokens` keys of a sequence."""
    length = jnp.minimum(jnp.asarray(tokens, jnp.int32), tables.lengths[source])
    return length // tables.page_size


def _shared(
    tables: PageTables, source: ArrayLike, target: ArrayLike, pages: jax.Array
) -> PageTables:
    """The target with the first `pages` pages of the source, in place of its own."""
    tables = with_lengths(tables, tables.lengths.at[target].set(0))
    is_shared = jnp.arange(tables.table.shape[1]) < pages
    row = jnp.where(is_shared, tables.table[source], NO_PAGE)
    return replace(
        tables,
        table=tables.table.at[target].set(row),
        lengths=tables.lengths.at[target].set(pages * tables.page_size),
        references=with_count_changed(tables.references, row, is_shared, 1),
    )


def fork(
    tables: PageTables, source: ArrayLike, target: ArrayLike
) -> tuple[PageTables, jax.Array, jax.Array]:
    """Start a second sequence from where one is, to sample another continuation.

    Full pages are shared. If the last page is not full, the target gets a new page, to which you
    copy it: `copy_pages(pages, from_page, to_page)` for each array of pages.

    Args:
      tables: the state.
      source: the slot of the sequence to continue.
      target: another slot; its sequence, if it has one, ends.

    Returns:
      The state, and the pages to copy from and to, int32 []; the same page if there is nothing to
      copy.

    Raises:
      OutOfPages: as for `reorder`.
      ValueError: source and target are not two slots, or as for `reorder`.
    """
    check_type(tables)
    is_impossible = _check_pair(tables, source, target, 0)
    parents = jnp.arange(tables.lengths.shape[0]).at[target].set(source)
    forked, from_page, to_page = reorder(tables, jnp.where(is_impossible, _NO_SLOT, parents))
    return forked, from_page[target], to_page[target]


def _check_pair(
    tables: PageTables, source: ArrayLike, target: ArrayLike, tokens: ArrayLike
) -> jax.Array:
    """bool []: not two slots, or an invalid number of tokens; raises if the values are known."""
    for name, x in (("source", source), ("target", target), ("tokens", tokens)):
        array = jnp.asarray(x)
        if array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
            got = f"{array.dtype.name}{list(array.shape)}"
            raise ValueError(f"{name}: expected an integer [], got {got}")
    pair, slots = jnp.stack([jnp.asarray(source), jnp.asarray(target)]), tables.lengths.shape[0]
    is_wrong = ((pair < 0) | (pair >= slots)).any() | (pair[0] == pair[1])
    is_negative = jnp.asarray(tokens) < 0
    if not is_tracer(is_wrong) and is_wrong:
        raise ValueError(
            f"source, target: expected two slots from 0 to {slots - 1}, got {int(pair[0])} and "
            f"{int(pair[1])}"
        )
    if not is_tracer(is_negative) and is_negative:
        raise ValueError(f"tokens: expected 0 or more, got {int(jnp.asarray(tokens))}")
    return is_wrong | is_negative
