"""The arrays of pages: creating, writing and copying them."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike

from attn_dispatch.call.layouts import KvLayout
from attn_dispatch.call.static_arguments import check_positive_int
from attn_dispatch.call.values import known_values
from attn_dispatch.choices import check_choice
from attn_dispatch.semantics.row_ids import search
from attn_dispatch.serving.tables import PageTables, check_type

_KEYS_AXIS = {"NHD": -3, "HND": -2}
"""The axis of a page's keys, by kv_layout."""


def new_pages(
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    sharding: Sharding | PartitionSpec | None = None,
) -> jax.Array:
    """Pages of zeros [P, page, K, H], for the keys or the values of a layer.

    On a mesh, shard K as the model's kv heads are sharded: `PartitionSpec(None, None, "model")`.
    For another order of axes (`kv_layout` of `paged_attention`) make any array of that shape.

    Raises:
      ValueError: a size is not an int above 0.
    """
    given = {"num_pages": num_pages, "page_size": page_size, "kv_heads": kv_heads}
    for name, x in (given | {"head_dim": head_dim}).items():
        check_positive_int(name, x)
    return jnp.zeros((num_pages, page_size, kv_heads, head_dim), dtype, device=sharding)


def write(
    pages: jax.Array,
    new: ArrayLike | tuple[ArrayLike, ArrayLike],
    tables: PageTables,
    tokens: ArrayLike | None = None,
    *,
    cu_seqlens: ArrayLike | None = None,
    kv_layout: KvLayout = "NHD",
) -> jax.Array:
    """Write the keys or values by which each sequence has just grown; returns the pages.

    The pages are written in place if they are donated to the jitted function around the call. If
    `tables.failed`, nothing is written.

    Args:
      pages: [P, page, K, H], or a pool [P, 2, page, K, H] of keys and values.
      new: [B, T, K, H], or with cu_seqlens [tokens, K, H], in order; cast to the pages' dtype. For
        a pool, a pair of such arrays, (keys, values).
      tables: the state after `grow`.
      tokens: [B] integers: how many of the T rows belong to each sequence; by default all.
      cu_seqlens: [B + 1] integers: sequence b has grown by the rows from cu_seqlens[b] to before
        cu_seqlens[b + 1].
      kv_layout: "HND" for pages [P, K, page, H] or a pool [P, 2, K, page, H].

    Raises:
      ValueError: arguments are in another order, shapes do not match, or known numbers of tokens
        exceed those in `new`. Traced numbers are not checked; rows that do not exist are not
        written.
    """
    if any(isinstance(x, PageTables) for x in (pages, new)):
        kinds = ", ".join(type(x).__name__ for x in (pages, new, tables))
        raise ValueError(f"write: expected pages, new and PageTables in this order, got {kinds}")
    check_type(tables)
    slots, least = tables.lengths.shape[0], tables.references.shape[0]
    axis = _KEYS_AXIS[check_choice("kv_layout", kv_layout, get_args(KvLayout), likeness=1.0)]
    is_pool = pages.ndim == 5 and pages.shape[1] == 2
    has_valid_axes = is_pool or pages.ndim == 4
    if not has_valid_axes or pages.shape[axis] != tables.page_size or pages.shape[0] < least:
        axes = "page, K" if kv_layout == "NHD" else "K, page"
        raise ValueError(
            f"pages: expected [P, {axes}, H] or [P, 2, {axes}, H] as tables have them, {least} or "
            f"more pages of {tables.page_size} keys, got {list(pages.shape)}"
        )
    row = (pages.shape[-2 if kv_layout == "NHD" else -3], pages.shape[-1])
    new, both = _new_rows(new, is_pool)
    if cu_seqlens is None:
        if new.ndim != 4 or new.shape[0] != slots or new.shape[2:] != row:
            raise ValueError(
                f"new: expected [{slots}, T, {row[0]}, {row[1]}], got {list(new.shape)}"
            )
        number = jnp.full(slots, new.shape[1]) if tokens is None else jnp.asarray(tokens)
        _check_integers("tokens", number, slots)
        known = known_values(tokens)
        if known is not None and ((known < 0) | (known > new.shape[1])).any():
            raise ValueError(
                f"tokens: expected numbers from 0 to {new.shape[1]}, got {known.tolist()}"
            )
        _check_room("new" if tokens is None else "tokens", tables, number)
        within = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
        slot = jnp.arange(slots, dtype=jnp.int32)[:, None]
        place = (tables.lengths - number)[:, None] + within
        is_new = (within < number[:, None]) & (place >= 0)
    else:
        if tokens is not None or new.ndim != 3 or new.shape[1:] != row:
            raise ValueError(
                f"new: expected [tokens, {row[0]}, {row[1]}] with cu_seqlens, and "
                f"no tokens, got {list(new.shape)}{'' if tokens is None else ' and tokens'}"
            )
        ends = jnp.asarray(cu_seqlens)
        _check_integers("cu_seqlens", ends, slots + 1)
        known = known_values(cu_seqlens)
        if known is not None and (
            known[0] or (np.diff(known) < 0).any() or known[-1] > new.shape[0]
        ):
            raise ValueError(
                f"cu_seqlens: expected ascending numbers from 0 to at most {new.shape[0]}, got "
                f"{known.tolist()}"
            )
        _check_room("cu_seqlens", tables, jnp.diff(ends))
        ends = ends.astype(jnp.int32)
        number = jnp.arange(new.shape[0], dtype=jnp.int32)
        index = search(ends[None], number[None], "right")[0] - 1
        slot = jnp.clip(index, 0, slots - 1)
        place = tables.lengths[slot] - (ends[slot + 1] - number)
        is_new = (index >= 0) & (index < slots) & (place >= 0)
    column = jnp.clip(place // tables.page_size, 0, tables.table.shape[1] - 1)
    # After a failed `grow`, writing would overwrite the last keys.
    is_new &= ~tables.failed
    page = jnp.where(is_new, tables.table[slot, column], -1)
    # A negative index would count from the end: rows without a page get an index past it.
    page = jnp.where(page < 0, pages.shape[0], page)
    between = (slice(None),) * (pages.ndim + axis - 1)
    rows = pages.at[(page, *between, place % tables.page_size)]
    return rows.set(both.astype(pages.dtype), mode="drop")


def _check_room(name: str, tables: PageTables, number: jax.Array) -> None:
    """Raise if a sequence has fewer keys than are to be written, where both are known."""
    known, lengths = known_values(number), known_values(tables.lengths)
    if known is None or lengths is None or known_values(tables.failed):
        return
    if (known > lengths).any():
        slot = int(np.argmax(known > lengths))
        hint = "; pass tokens, the numbers by which slots have grown" if name == "new" else ""
        raise ValueError(
            f"{name}: expected at most {int(lengths[slot])} for slot {slot}, which has no more "
            f"keys after grow, got {int(known[slot])}{hint}"
        )


def _new_rows(
    new: ArrayLike | tuple[ArrayLike, ArrayLike], is_pool: bool
) -> tuple[jax.Array, jax.Array]:
    """The new keys [..., K, H], and the rows to write: the same or, for a pool, [..., 2, K, H]."""
    if not is_pool and not isinstance(new, tuple):
        rows = jnp.asarray(new)
        return rows, rows
    if not is_pool or not isinstance(new, tuple) or len(new) != 2:
        expected = "a pair (keys, values) for a pool of both" if is_pool else "an array for pages"
        raise ValueError(f"new: expected {expected}, got {type(new).__name__}")
    keys, values = (jnp.asarray(x) for x in new)
    if keys.shape != values.shape:
        raise ValueError(
            f"new: expected keys and values of one shape, got {list(keys.shape)} and "
            f"{list(values.shape)}"
        )
    return keys, jnp.stack([keys, values], axis=-3)


def _check_integers(name: str, x: jax.Array, number: int) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.shape != (number,):
        raise ValueError(f"{name}: expected integers [{number}], got {x.dtype.name}{list(x.shape)}")


def copy_pages(pages: jax.Array, from_page: ArrayLike, to_page: ArrayLike) -> jax.Array:
    """The pages [P, ...] with one or several pages copied, as needed after `fork` and `reorder`.

    Raises:
      ValueError: from_page and to_page are not integers of the same shape, or known numbers are not
        those of pages.
    """
    start, end = jnp.asarray(from_page), jnp.asarray(to_page)
    if start.shape != end.shape or any(
        not jnp.issubdtype(x.dtype, jnp.integer) for x in (start, end)
    ):
        raise ValueError(
            "from_page, to_page: expected integers of one shape, got "
            f"{start.dtype.name}{list(start.shape)} and {end.dtype.name}{list(end.shape)}"
        )
    for name, x in (("from_page", from_page), ("to_page", to_page)):
        known = known_values(x)
        if known is not None and ((known < 0) | (known >= pages.shape[0])).any():
            raise ValueError(
                f"{name}: expected pages from 0 to {pages.shape[0] - 1}, got {known.tolist()}"
            )
    return pages.at[end].set(pages[start])
