"""Page tables, which map sequences to pages: allocating, sharing, counting and freeing pages.

A *slot* is a row of the tables, which holds one sequence or none. Only one sequence writes to a
page: pages that several share are full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attn_dispatch.call.static_arguments import check_positive_int
from attn_dispatch.typed_jax import is_tracer

NO_PAGE = -1
"""The entry of a table where a sequence has no page."""


class OutOfPages(RuntimeError):
    """A sequence cannot grow: there are not enough free pages, or its table has no room."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("table", "lengths", "references", "failed"),
    meta_fields=("page_size",),
)
@dataclass(frozen=True)
class PageTables:
    """The state of a cache, without its pages; a pytree. Each of B slots has up to M of P pages."""

    table: jax.Array
    """int32 [B, M]: the `page_table` for `paged_attention`. -1 where a sequence has no page: past
    its length, and where `free_behind` has freed it."""
    lengths: jax.Array
    """int32 [B]: the number of keys of each sequence, its `key_value_seq_lengths`."""
    references: jax.Array
    """int32 [P]: how many sequences use each page."""
    failed: jax.Array
    """bool []: whether a traced operation failed. It then changed nothing. Until `recovered`, only
    `free` changes anything, and nothing is written: see `raise_if_failed`."""
    page_size: int
    """The number of keys in a page; static."""

    @property
    def free_pages(self) -> jax.Array:
        """int32 []: the number of pages that no sequence uses."""
        return (self.references == 0).sum(dtype=jnp.int32)

    def pages_of(self, lengths: ArrayLike) -> jax.Array:
        """int32: the number of pages that sequences of these lengths need."""
        return -(-jnp.asarray(lengths, jnp.int32) // self.page_size)


def new_tables(slots: int, pages_per_slot: int, num_pages: int, page_size: int) -> PageTables:
    """Tables without a sequence.

    Args:
      slots: B, the largest number of sequences at a time.
      pages_per_slot: M; a sequence has at most M · page_size keys.
      num_pages: P, the number of pages that `new_pages` makes.
      page_size: keys in a page; for cuDNN a power of two, or a multiple of 8.

    Raises:
      ValueError: a size is not an int above 0.
    """
    given = {"slots": slots, "pages_per_slot": pages_per_slot, "num_pages": num_pages}
    for name, x in (given | {"page_size": page_size}).items():
        check_positive_int(name, x)
    return PageTables(
        table=jnp.full((slots, pages_per_slot), NO_PAGE, jnp.int32),
        lengths=jnp.zeros(slots, jnp.int32),
        references=jnp.zeros(num_pages, jnp.int32),
        failed=jnp.zeros((), bool),
        page_size=page_size,
    )


def grow(tables: PageTables, tokens: ArrayLike) -> PageTables:
    """Make room for new keys, which count at once: `write` them before the next attention call.

    If there is not enough room for all, nothing changes.

    Args:
      tables: the state.
      tokens: [B] integers, 0 or more: the number of new keys of each slot.

    Raises:
      OutOfPages: there are not enough pages, or tables have failed before. In traced code nothing
        is raised, nothing changes, and `failed` is True from then on.
      ValueError: tokens are not [B]; or sequences would write to one page; or rows of the table
        were moved without `reorder`, as in `table[parents]`, which is noticed as far as references
        or lengths no longer fit the table. In traced code such tables are a failure too.
    """
    is_moved = raise_if_known_unusable(tables)
    tokens = checked_integers_by_slot("tokens", tables, tokens)
    lengths = tables.lengths + tokens
    have, want = tables.pages_of(tables.lengths), tables.pages_of(lengths)
    needed = want - have
    column = jnp.arange(tables.table.shape[1], dtype=jnp.int32)[None]
    is_new = (column >= have[:, None]) & (column < want[:, None])
    # The new pages of all slots, one slot after the other, take the free pages in order.
    order = (jnp.cumsum(needed) - needed)[:, None] + column - have[:, None]
    taken = jnp.take(free_pages_in_order(tables.references), order, mode="clip")
    table = jnp.where(is_new, taken, tables.table)
    references = with_count_changed(tables.references, taken, is_new, 1)
    too_long = (want > tables.table.shape[1]).any()
    last, is_shared = _last_page_is_shared(tables, tables.lengths)
    is_impossible = too_long | (needed.sum() > tables.free_pages) | (tokens < 0).any()
    is_impossible |= (is_shared & (tokens > 0)).any()
    if not is_tracer(is_impossible) and is_impossible:
        if (is_shared & (tokens > 0)).any():
            slot = int(jnp.argmax(is_shared & (tokens > 0)))
            raise ValueError(
                f"tokens: expected none for slots that end inside a shared page, got "
                f"{int(tokens[slot])} for slot {slot}, whose last page, {int(last[slot])}, other "
                "sequences have too: serving.fork and serving.reorder say which pages to copy"
            )
        if too_long:
            slot = int(jnp.argmax(want))
            raise OutOfPages(
                f"slot {slot}: expected at most {tables.table.shape[1] * tables.page_size} keys, "
                f"got {int(lengths[slot])}"
            )
        if (tokens < 0).any():
            raise ValueError(f"tokens: expected 0 or more, got {int(tokens.min())}")
        raise OutOfPages(
            f"expected at most {int(tables.free_pages)} new pages, as many as are free of "
            f"{tables.references.shape[0]}, got {int(needed.sum())}"
        )
    grown = replace(tables, table=table, lengths=lengths, references=references)
    return unchanged_if_failed(is_impossible | is_moved, tables, grown)


def shrink(tables: PageTables, tokens: ArrayLike) -> PageTables:
    """Remove the last keys of each sequence, for example those of a rejected draft.

    Args:
      tables: the state.
      tokens: [B] integers, 0 or more: the number of keys to remove; at most all are removed.

    Raises:
      OutOfPages: tables have failed before.
      ValueError: tables as for `grow`; tokens are not [B], or below 0; or a sequence would end
        inside a page that is shared, or that `free_behind` has freed, where nothing could be
        written. In traced code invalid values raise nothing: nothing changes, and `failed` is True
        from then on.
    """
    is_moved = raise_if_known_unusable(tables)
    tokens = checked_integers_by_slot("tokens", tables, tokens)
    lengths = jnp.clip(tables.lengths - tokens, 0, tables.lengths)
    page, is_shared = _last_page_is_shared(tables, lengths)
    is_freed = (page < 0) & (lengths % tables.page_size > 0)
    is_wrong = (is_shared | is_freed) & (lengths < tables.lengths)
    is_impossible = is_wrong.any() | (tokens < 0).any()
    if not is_tracer(is_impossible) and is_impossible:
        if (tokens < 0).any():
            raise ValueError(f"tokens: expected 0 or more, got {int(tokens.min())}")
        slot = int(jnp.argmax(is_wrong))
        where = (
            "a page that was given back behind a window"
            if page[slot] < 0
            else f"page {int(page[slot])}, which other sequences have too"
        )
        raise ValueError(
            "tokens: expected a number after which no sequence ends inside a shared or freed page; "
            f"slot {slot} would keep {int(lengths[slot])} keys, and end inside {where}"
        )
    return unchanged_if_failed(is_impossible | is_moved, tables, with_lengths(tables, lengths))


def _last_page_is_shared(tables: PageTables, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B]: the page in which a sequence of these lengths ends, and whether it ends inside a page
    that other sequences have too."""
    last = jnp.maximum(tables.pages_of(lengths) - 1, 0)
    page = jnp.take_along_axis(tables.table, last[:, None], axis=1)[:, 0]
    has_others = (page >= 0) & (tables.references[jnp.maximum(page, 0)] > 1)
    return page, has_others & (lengths % tables.page_size > 0)


def free(tables: PageTables, slots: ArrayLike) -> PageTables:
    """End the sequences in these slots; their pages become free, except for shared ones.

    Args:
      tables: the state.
      slots: bool [B], True for those to end.

    Raises:
      ValueError: slots are not bool [B], or tables as for `grow`.
    """
    check_type(tables)
    is_moved = raise_if_known_moved(tables)
    is_ended = checked_slots(tables, slots) & ~is_moved
    freed = with_lengths(tables, jnp.where(is_ended, 0, tables.lengths))
    return replace(freed, failed=tables.failed | is_moved)


def raise_if_failed(tables: PageTables) -> None:
    """Raise the error that traced code could not raise. Call it outside `jax.jit`, after a step.

    The sequences are as they were before the failure. To go on, `free` some, and use `recovered`.

    Raises:
      OutOfPages: an operation ran out of pages, would have shrunk a sequence into a shared or freed
        page, or got a number of tokens or a window below 0, or parents that are not slots.
      ValueError: rows of the table were moved without `reorder`.
    """
    check_type(tables)
    if tables.failed:
        raise_if_known_moved(tables)
        number, room = tables.references.shape[0], tables.table.shape[1] * tables.page_size
        raise OutOfPages(
            "in traced code a sequence could not grow, shrink or move, and nothing has changed "
            f"since but by free: now {int(tables.free_pages)} of {number} pages are free, and a "
            f"slot holds {room} keys. To go on, free some, and take serving.recovered(tables)"
        )


def recovered(tables: PageTables) -> PageTables:
    """The tables after a failure, ready for use: sequences are as they were before it."""
    check_type(tables)
    return replace(tables, failed=jnp.zeros((), bool))


def check_type(tables: object) -> None:
    """Check that an argument is tables, and no result with more in it."""
    if not isinstance(tables, PageTables):
        is_array = isinstance(tables, jax.Array | np.ndarray)
        got = "an array" if is_array else type(tables).__name__
        hint = "; reorder and fork return (tables, from_page, to_page)" * isinstance(tables, tuple)
        raise ValueError(f"tables: expected PageTables, got {got}{hint}")


def raise_if_known_unusable(tables: PageTables) -> jax.Array:
    """bool []: whether rows were moved; raises if that, or a failure in traced code, is known."""
    check_type(tables)
    if not is_tracer(tables.failed):
        raise_if_failed(tables)
    return raise_if_known_moved(tables)


def with_lengths(tables: PageTables, lengths: jax.Array) -> PageTables:
    """The sequences cut to these lengths, which do not exceed the present ones."""
    have, keep = tables.pages_of(tables.lengths), tables.pages_of(lengths)
    column = jnp.arange(tables.table.shape[1], dtype=jnp.int32)[None]
    is_dropped = (column >= keep[:, None]) & (column < have[:, None])
    return replace(
        tables,
        table=jnp.where(is_dropped, NO_PAGE, tables.table),
        lengths=lengths,
        references=with_count_changed(tables.references, tables.table, is_dropped, -1),
    )


def with_count_changed(
    references: jax.Array, pages: jax.Array, is_counted: jax.Array, change: int
) -> jax.Array:
    """References [P] after `change` is added for each of `pages` where `is_counted`; any shape."""
    at = jnp.where(is_counted & (pages >= 0), pages, references.shape[0])
    return references.at[at].add(change, mode="drop")


def counted_references(table: jax.Array, num_pages: int) -> jax.Array:
    """int32 [P]: how often each page is in a table."""
    return with_count_changed(jnp.zeros(num_pages, jnp.int32), table, table >= 0, 1)


def raise_if_known_moved(tables: PageTables) -> jax.Array:
    """bool []: whether the table does not fit the references or lengths; raises if that is known.

    It does not after rows of the table were moved without the functions of this module. Several
    sequences might then write to one page, and pages that are in use might become free.
    """
    found = counted_references(tables.table, tables.references.shape[0])
    is_counted_wrong, is_misfit = found != tables.references, _does_not_fit_length(tables)
    is_moved = is_counted_wrong.any() | is_misfit.any()
    if not is_tracer(is_moved) and is_moved:
        if is_counted_wrong.any():
            page = int(jnp.argmax(is_counted_wrong))
            problem = (
                f"references to say how many rows of the table have each page, got "
                f"{int(tables.references[page])} for page {page}, which {int(found[page])} have"
            )
        else:
            slot = int(jnp.argmax(is_misfit))
            problem = (
                f"{int(tables.pages_of(tables.lengths)[slot])} pages for the "
                f"{int(tables.lengths[slot])} keys of slot {slot}, got the row "
                f"{tables.table[slot].tolist()}"
            )
        raise ValueError(
            f"tables: expected {problem}. To move rows, as in table[parents], take "
            "serving.reorder(tables, parents)"
        )
    return is_moved


def _does_not_fit_length(tables: PageTables) -> jax.Array:
    """bool [B]: whether a sequence has a page past its length, or none where it must have one.

    `free_behind` frees pages from the first on, but none that is not full.
    """
    column = jnp.arange(tables.table.shape[1], dtype=jnp.int32)[None]
    lengths, has_page = tables.lengths[:, None], tables.table >= 0
    is_past = column * tables.page_size >= lengths
    is_partial = ~is_past & ((column + 1) * tables.page_size > lengths)
    follows_one = jnp.pad(has_page[:, :-1], ((0, 0), (1, 0)))
    must_have = is_partial | (follows_one & ~is_past)
    return ((has_page & is_past) | (must_have & ~has_page)).any(axis=1)


def free_pages_in_order(references: jax.Array) -> jax.Array:
    """int32 [P]: the pages without references in ascending order; the rest is unspecified."""
    is_free, number = references == 0, references.shape[0]
    at = jnp.where(is_free, jnp.cumsum(is_free) - 1, number)
    return jnp.zeros(number, jnp.int32).at[at].set(jnp.arange(number, dtype=jnp.int32), mode="drop")


def unchanged_if_failed(failed: ArrayLike, before: PageTables, after: PageTables) -> PageTables:
    """The state `after`; if this or an earlier operation failed, `before`, marked as failed."""
    failed = before.failed | failed

    def kept_of(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(failed, x, y)

    kept = jax.tree.map(kept_of, before, after)
    return replace(kept, failed=failed)


def checked_slots(tables: PageTables, slots: ArrayLike) -> jax.Array:
    """The mask of slots, checked to be bool [B]."""
    slots = jnp.asarray(slots)
    if slots.dtype != jnp.bool_ or slots.shape != tables.lengths.shape:
        raise ValueError(
            f"slots: expected a mask, bool {list(tables.lengths.shape)}, got "
            f"{slots.dtype.name}{list(slots.shape)}"
        )
    return slots


def checked_integers_by_slot(name: str, tables: PageTables, x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.shape != tables.lengths.shape:
        raise ValueError(
            f"{name}: expected integers {list(tables.lengths.shape)}, got "
            f"{x.dtype.name}{list(x.shape)}"
        )
    return x.astype(jnp.int32)
