"""Freeing the pages behind a sliding window."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.serving.tables import (
    NO_PAGE,
    PageTables,
    checked_slots,
    raise_if_known_unusable,
    unchanged_if_failed,
    with_count_changed,
)
from attn_dispatch.typed_jax import is_tracer


def free_behind(
    tables: PageTables, window: ArrayLike, slots: ArrayLike | None = None
) -> PageTables:
    """Free the pages that no later query's window reaches. The other pages keep their place.

    Such a page has only keys before `lengths - window`: the next query stands at `lengths`, and
    with `local_window_size=(window, ...)` of `paged_attention` it attends to keys from there on. A
    sequence then has about `window / page_size + 1` pages, however long it is, but its length is
    still limited by the table's columns. Call this at the end of a step and, with drafts, after the
    rejected ones are removed: `shrink` moves the window back, to pages that may be freed.

    Args:
      tables: the state. All its layers have this window or a narrower one; layers with a wider
        window, or none, need separate tables.
      window: integers, 0 or more, [] or [B]: the window's left side.
      slots: bool [B]: the sequences whose pages are freed; by default all.

    Raises:
      OutOfPages: tables have failed before.
      ValueError: window or slots are something else, or tables as for `grow`. In traced code a
        window below 0 raises nothing: nothing changes, and `failed` is True from then on.
    """
    is_moved = raise_if_known_unusable(tables)
    expected = f"the left side alone, integers [] or {list(tables.lengths.shape)}"
    if window is None:
        raise ValueError(f"window: expected {expected}, got None")
    window = jnp.asarray(window)
    is_integer = jnp.issubdtype(window.dtype, jnp.integer)
    if not is_integer or window.shape not in ((), tables.lengths.shape):
        got = f"{window.dtype.name}{list(window.shape)}"
        raise ValueError(f"window: expected {expected}, got {got}")
    is_impossible = (window < 0).any()
    if not is_tracer(is_impossible) and is_impossible:
        raise ValueError(f"window: expected 0 or more, got {int(window.min())}")
    ends = tables.page_size * (1 + jnp.arange(tables.table.shape[1], dtype=jnp.int32))[None]
    first = tables.lengths - window.astype(jnp.int32)
    is_freed = (ends <= first.reshape(-1, 1)) & (tables.table >= 0)
    if slots is not None:
        is_freed &= checked_slots(tables, slots)[:, None]
    freed = replace(
        tables,
        table=jnp.where(is_freed, NO_PAGE, tables.table),
        references=with_count_changed(tables.references, tables.table, is_freed, -1),
    )
    return unchanged_if_failed(is_impossible | is_moved, tables, freed)
