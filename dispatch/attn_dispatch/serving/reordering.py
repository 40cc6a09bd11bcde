"""All slots moved to other sequences at once, as beam search does after each token."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.serving.tables import (
    NO_PAGE,
    OutOfPages,
    PageTables,
    checked_integers_by_slot,
    counted_references,
    free_pages_in_order,
    raise_if_known_unusable,
    unchanged_if_failed,
    with_count_changed,
)
from attn_dispatch.typed_jax import is_tracer


def reorder(tables: PageTables, parents: ArrayLike) -> tuple[PageTables, jax.Array, jax.Array]:
    """Let every slot continue the sequence that another one has, or its own, all at once.

    Full pages are shared. If a sequence's last page is not full, its own slot keeps the page, or,
    if that leaves the sequence, the first slot that continues it. Each further slot gets a new
    page: copy the last one to it, `copy_pages(pages, from_page, to_page)`, for each array of pages,
    before the next `write`. The pages of a sequence that no slot continues become free, and may be
    among the new ones.

    Args:
      tables: the state.
      parents: [B] integers: the slot whose sequence each slot continues, or -1 to leave it empty.

    Returns:
      The state, and the pages to copy from and to, int32 [B]; the same page where there is nothing
      to copy.

    Raises:
      OutOfPages: there are not enough pages, or tables have failed before. In traced code nothing
        is raised, nothing changes, and `failed` is True from then on.
      ValueError: parents are not [B], or not slots; or tables as for `grow`. In traced code such
        values are a failure too.
    """
    is_moved = raise_if_known_unusable(tables)
    parents = checked_integers_by_slot("parents", tables, parents)
    slots = parents.shape[0]
    is_wrong = ((parents < -1) | (parents >= slots)).any()
    if not is_tracer(is_wrong) and is_wrong:
        raise ValueError(
            f"parents: expected slots from 0 to {slots - 1}, or -1, got {parents.tolist()}"
        )
    is_empty, source = parents < 0, jnp.clip(parents, 0, slots - 1)
    lengths = jnp.where(is_empty, 0, tables.lengths[source])
    last = jnp.maximum(tables.pages_of(lengths) - 1, 0)[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)
    has_earlier = ((parents[:, None] == parents) & (slot < slot[:, None])).any(axis=1)
    is_further = jnp.where(parents[source] == source, source != slot, has_earlier)
    # An empty sequence ends in no page, and so in none that is not full.
    is_copied = is_further & (lengths % tables.page_size > 0)
    table = jnp.where(is_empty[:, None], NO_PAGE, tables.table[source])
    column = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    is_new = is_copied[:, None] & (column == last)
    kept = counted_references(jnp.where(is_new, NO_PAGE, table), tables.references.shape[0])
    order = jnp.cumsum(is_copied) - 1
    taken = jnp.take(free_pages_in_order(kept), order, mode="clip")
    too_many = is_copied.sum() > (kept == 0).sum()
    if not is_tracer(too_many) and too_many:
        raise OutOfPages(
            f"expected at most {int((kept == 0).sum())} new pages, as many as are free of "
            f"{kept.shape[0]}, got {int(is_copied.sum())}"
        )
    after = replace(
        tables,
        table=jnp.where(is_new, taken[:, None], table),
        lengths=lengths,
        references=with_count_changed(kept, taken, is_copied, 1),
    )
    after = unchanged_if_failed(is_wrong | is_moved | too_many, tables, after)
    to_page = jnp.take_along_axis(after.table, last, axis=1)[:, 0]
    from_page = jnp.take_along_axis(tables.table[source], last, axis=1)[:, 0]
    is_copied &= ~after.failed
    # A slot without a page repeats another's copy: to copy any page to itself could undo one.
    has_page = to_page >= 0
    same = jnp.where(has_page, slot, jnp.argmax(has_page))
    to_page = jnp.maximum(to_page, 0)[same]
    return after, jnp.where(is_copied, from_page, to_page)[same], to_page
