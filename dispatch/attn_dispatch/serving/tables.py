"""Which pages belong to which sequence: allocated, shared, counted and freed.

A *slot* is a row of the tables, which holds one sequence or none. A page is written by one sequence
alone: those that several share are full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

NO_PAGE = -1
"""In a table, where a sequence has none."""


class OutOfPages(RuntimeError):
    """A sequence cannot grow: there are not enough free pages, or its table has no room."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("table", "lengths", "references", "failed"),
    meta_fields=("page_size",),
)
@dataclass(frozen=True)
class PageTables:
    """The state of a cache, but for its pages; a pytree. B slots, M pages a slot, P pages."""

    table: jax.Array
    """int32 [B, M], `page_table` of `paged_attention`; -1 where a sequence has no page."""
    lengths: jax.Array
    """int32 [B], its `key_value_seq_lengths`: the keys of each sequence."""
    references: jax.Array
    """int32 [P]: how many sequences have the page."""
    failed: jax.Array
    """bool []: something traced could not be done, and changed nothing. See `raise_if_failed`."""
    page_size: int
    """Keys in a page; static."""

    @property
    def free_pages(self) -> jax.Array:
        """int32 []: how many pages no sequence has."""
        return (self.references == 0).sum(dtype=jnp.int32)

    def pages_of(self, lengths: ArrayLike) -> jax.Array:
        """int32: the pages that sequences of these lengths have."""
        return -(-jnp.asarray(lengths, jnp.int32) // self.page_size)


def new_tables(slots: int, pages_per_slot: int, num_pages: int, page_size: int) -> PageTables:
    """Tables without a sequence.

    Args:
      slots: B, the most sequences at a time.
      pages_per_slot: M; a sequence has at most M · page_size keys.
      num_pages: P, of the arrays that `new_pages` makes.
      page_size: keys in a page; for cuDNN a power of two, or a multiple of 8.

    Raises:
      ValueError: a number below 1.
    """
    given = {"slots": slots, "pages_per_slot": pages_per_slot, "num_pages": num_pages}
    for name, x in (given | {"page_size": page_size}).items():
        if x < 1:
            raise ValueError(f"{name}: expected 1 or more, got {x}")
    return PageTables(
        table=jnp.full((slots, pages_per_slot), NO_PAGE, jnp.int32),
        lengths=jnp.zeros(slots, jnp.int32),
        references=jnp.zeros(num_pages, jnp.int32),
        failed=jnp.zeros((), bool),
        page_size=page_size,
    )


def grow(tables: PageTables, tokens: ArrayLike) -> PageTables:
    """Make room for so many more keys, which count as there: `write` them before they are read.

    All sequences grow or none does.

    Args:
      tables: the state.
      tokens: [B] integers, 0 or more, for each slot.

    Raises:
      OutOfPages: there are not enough pages. In traced code nothing is raised, nothing changes, and
        `failed` is True from then on.
      ValueError: tokens are not [B].
    """
    tokens = _of_slots("tokens", tables, tokens)
    lengths = tables.lengths + tokens
    have, want = tables.pages_of(tables.lengths), tables.pages_of(lengths)
    needed = want - have
    column = jnp.arange(tables.table.shape[1], dtype=jnp.int32)[None]
    is_new = (column >= have[:, None]) & (column < want[:, None])
    # The new pages of all slots, one slot after the other, take the free pages in order.
    order = (jnp.cumsum(needed) - needed)[:, None] + column - have[:, None]
    free_pages = _free_pages(tables)
    taken = jnp.take(free_pages, order, mode="clip")
    table = jnp.where(is_new, taken, tables.table)
    references = _counted(tables.references, taken, is_new, 1)
    too_long = (want > tables.table.shape[1]).any()
    is_impossible = too_long | (needed.sum() > tables.free_pages) | (tokens < 0).any()
    if not isinstance(is_impossible, Tracer) and is_impossible:
        if too_long:
            slot = int(jnp.argmax(want))
            raise OutOfPages(
                f"slot {slot}: expected at most {tables.table.shape[1] * tables.page_size} keys, "
                f"got {int(lengths[slot])}"
            )
        if (tokens < 0).any():
            raise ValueError(f"tokens: expected 0 or more, got {int(tokens.min())}")
        raise OutOfPages(
            f"expected at most {int(tables.free_pages)} new pages, which are free of "
            f"{tables.references.shape[0]}, got {int(needed.sum())}"
        )
    grown = replace(tables, table=table, lengths=lengths, references=references)
    return _unless(is_impossible, tables, grown)


def shrink(tables: PageTables, tokens: ArrayLike) -> PageTables:
    """Take back the last keys of each sequence, those of a draft that was not accepted, say.

    Args:
      tables: the state.
      tokens: [B] integers, 0 or more; of more than there are, all.

    Raises:
      ValueError: tokens are not [B]; or a sequence would end inside a page that others have too,
        where nothing could be written. In traced code nothing is raised then, nothing changes, and
        `failed` is True from then on.
    """
    tokens = _of_slots("tokens", tables, tokens)
    lengths = jnp.clip(tables.lengths - tokens, 0, tables.lengths)
    last = jnp.maximum(tables.pages_of(lengths) - 1, 0)
    page = jnp.take_along_axis(tables.table, last[:, None], axis=1)[:, 0]
    is_shared = tables.references[jnp.maximum(page, 0)] > 1
    is_wrong = is_shared & (lengths % tables.page_size > 0) & (lengths < tables.lengths)
    if not isinstance(is_wrong, Tracer) and is_wrong.any():
        slot = int(jnp.argmax(is_wrong))
        raise ValueError(
            f"tokens: slot {slot} would keep {int(lengths[slot])} keys, and end inside page "
            f"{int(page[slot])}, which other sequences have too"
        )
    return _unless(is_wrong.any(), tables, _cut(tables, lengths))


def free(tables: PageTables, slots: ArrayLike) -> PageTables:
    """End the sequences of these slots: pages that no other sequence has are free again.

    Args:
      tables: the state.
      slots: bool [B].
    """
    slots = jnp.asarray(slots)
    if slots.dtype != jnp.bool_ or slots.shape != tables.lengths.shape:
        raise ValueError(
            f"slots: expected bool {list(tables.lengths.shape)}, got "
            f"{slots.dtype.name}{list(slots.shape)}"
        )
    return _cut(tables, jnp.where(slots, 0, tables.lengths))


def share_prefix(
    tables: PageTables, source: ArrayLike, target: ArrayLike, tokens: ArrayLike
) -> PageTables:
    """Begin a sequence with the full pages of another that hold its first keys.

    The target then has `tokens` rounded down to whole pages; the rest is the caller's to write.

    Args:
      tables: the state.
      source: the slot of the sequence that is there.
      target: another slot, whose sequence, if it has one, ends.
      tokens: how many keys the two have in common; the source has as many.
    """
    tables = _cut(tables, tables.lengths.at[target].set(0))
    length = jnp.minimum(jnp.asarray(tokens, jnp.int32), tables.lengths[source])
    pages = length // tables.page_size
    is_shared = jnp.arange(tables.table.shape[1]) < pages
    row = jnp.where(is_shared, tables.table[source], NO_PAGE)
    return replace(
        tables,
        table=tables.table.at[target].set(row),
        lengths=tables.lengths.at[target].set(pages * tables.page_size),
        references=_counted(tables.references, row, is_shared, 1),
    )


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
    """
    length = tables.lengths[source]
    shared = share_prefix(tables, source, target, length)
    rest = length - shared.lengths[target]
    grown = grow(shared, jnp.zeros_like(tables.lengths).at[target].set(rest))
    grown = _unless(grown.failed & ~tables.failed, tables, grown)
    last = jnp.maximum(tables.pages_of(length) - 1, 0)
    from_page, to_page = grown.table[source, last], grown.table[target, last]
    is_copied = (rest > 0) & ~grown.failed
    return grown, from_page, jnp.where(is_copied, to_page, from_page)


def raise_if_failed(tables: PageTables) -> None:
    """Raise what traced code could not.

    Raises:
      OutOfPages: since the tables were made something ran out of pages, or would have shrunk into a
        page that is shared.
    """
    if tables.failed:
        number, room = tables.references.shape[0], tables.table.shape[1] * tables.page_size
        raise OutOfPages(
            f"a sequence could not grow, or shrink: {int(tables.free_pages)} of {number} pages are "
            f"free, and a slot holds {room} keys"
        )


def _cut(tables: PageTables, lengths: jax.Array) -> PageTables:
    """The sequences with these lengths, which are not longer than they are."""
    have, keep = tables.pages_of(tables.lengths), tables.pages_of(lengths)
    column = jnp.arange(tables.table.shape[1], dtype=jnp.int32)[None]
    is_dropped = (column >= keep[:, None]) & (column < have[:, None])
    return replace(
        tables,
        table=jnp.where(is_dropped, NO_PAGE, tables.table),
        lengths=lengths,
        references=_counted(tables.references, tables.table, is_dropped, -1),
    )


def _counted(
    references: jax.Array, pages: jax.Array, is_counted: jax.Array, change: int
) -> jax.Array:
    """References with those pages that count, of any shape, changed."""
    at = jnp.where(is_counted, pages, references.shape[0])
    return references.at[at].add(change, mode="drop")


def _free_pages(tables: PageTables) -> jax.Array:
    """int32 [P]: the free pages in ascending order, then anything."""
    is_free, number = tables.references == 0, tables.references.shape[0]
    at = jnp.where(is_free, jnp.cumsum(is_free) - 1, number)
    return jnp.zeros(number, jnp.int32).at[at].set(jnp.arange(number, dtype=jnp.int32), mode="drop")


def _unless(failed: jax.Array, before: PageTables, after: PageTables) -> PageTables:
    kept = jax.tree.map(lambda x, y: jnp.where(failed, x, y), before, after)
    return replace(kept, failed=before.failed | failed)


def _of_slots(name: str, tables: PageTables, x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.shape != tables.lengths.shape:
        raise ValueError(
            f"{name}: expected integers {list(tables.lengths.shape)}, got "
            f"{x.dtype.name}{list(x.shape)}"
        )
    return x.astype(jnp.int32)
