"""Keys and values in pages, gathered into ordinary arrays."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import Operands, with_role
from attn_dispatch.call.spec import AttentionSpec

_IN_PAGES = with_role("pages")


def gathered_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the same call on ordinary key and value arrays."""
    others = [x for x in spec.operands if x.name not in _IN_PAGES]
    operands = (others[0], spec.made("key"), spec.made("value"), *others[1:])
    names = tuple(x.name for x in operands)
    options = replace(
        spec.options,
        operands=names,
        meaning=replace(spec.meaning, value_page=0, heads_first_kv=False),
        promises=replace(spec.promises, whole_pages=False),
    )
    return AttentionSpec(options, operands)


def gathered(spec: AttentionSpec, operands: Operands) -> dict[str, jax.Array]:
    """The operands of `gathered_spec`: all keys that the table has room for, copied.

    Keys past a length are unspecified: they come from any page.
    """
    table = _table_to_gather(spec, operands)
    found = {name: x for name, x in operands.items() if name not in _IN_PAGES}
    if not spec.promises.is_checked:
        # Without a page table, a length of -1 marks the row as invalid.
        lengths = operands["key_value_seq_lengths"]
        found["key_value_seq_lengths"] = jnp.where(lacks_pages(spec, operands), -1, lengths)
    for name in ("key", "value"):
        rows = _at_pages(spec, operands, name, table)
        found[name] = rows.reshape(spec.batch, spec.seq_len_kv, *rows.shape[-2:])
    return found


def keys_at(
    spec: AttentionSpec, operands: Operands, places: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The keys and values [B, L, K, ·] at `places` [B, L] of each row, paged or not.

    Places outside the row read another place of it. Places in a page behind the window are 0.
    """
    if not spec.is_paged:
        rows = jnp.arange(spec.batch, dtype=jnp.int32)[:, None]
        at = jnp.clip(places, 0, spec.seq_len_kv - 1)
        return operands["key"][rows, at], operands["value"][rows, at]
    number = jnp.clip(places // spec.page_size, 0, spec.shape("page_table")[1] - 1)
    page = jnp.take_along_axis(_table_to_gather(spec, operands), number, axis=1)
    inside = places % spec.page_size
    key, value = (_at_pages(spec, operands, name, page, inside) for name in ("key", "value"))
    return key, value


def lacks_pages(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """bool [B]: the row's table lacks a page that a query needs, one before the row's length and
    not behind its window."""
    table, pages = operands["page_table"], spec.shape("key_pages")[1]
    is_missing = (table < 0) | (table >= pages)
    return (is_missing & _is_reached(spec, operands)).any(axis=1)


def flat_pages(pages: jax.Array) -> jax.Array:
    """[C, P, page, K, ·] as [C · P, page, K, ·]."""
    pools, number = pages.shape[:2]
    return pages.reshape(pools * number, *pages.shape[2:])


def flat_table(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """The page table [B, M] int32 for `flat_pages`, the pages of all pools end to end.

    Kernels may read entries past a length and behind the window, so these name the pool's first
    page. In a call on whole pages they stay as given.
    """
    pools, pages = spec.shape("key_pages")[:2]
    first = pages * (jnp.arange(spec.batch, dtype=jnp.int32) // (spec.batch // pools))
    table = operands["page_table"]
    if not spec.promises.whole_pages:
        table = jnp.where(_is_reached(spec, operands), table, 0)
    return jnp.clip(table, 0, pages - 1) + first[:, None]


def first_reached(spec: AttentionSpec, operands: Operands) -> jax.Array | None:
    """int32 [B]: the first key that some query of the row may attend to; None without a window.

    The diagonal ends at the last query and the last key. A value below 0 means the first key.
    """
    if spec.has("window"):
        left = jnp.minimum(operands["window"][:, 0], spec.seq_len_q + spec.seq_len_kv)
    elif (left := spec.band[0]) is None:
        return None
    queries = spec.seq_len_q
    if spec.has("query_seq_lengths"):
        queries = jnp.clip(operands["query_seq_lengths"], 0, queries)
    return operands["key_value_seq_lengths"] - queries - left


def _is_reached(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """bool [B, M]: the page has keys before the row's length that are not behind its window."""
    begins = spec.page_size * jnp.arange(spec.shape("page_table")[1], dtype=jnp.int32)[None]
    is_reached = begins < operands["key_value_seq_lengths"][:, None]
    first = first_reached(spec, operands)
    return is_reached if first is None else is_reached & (begins + spec.page_size > first[:, None])


def _table_to_gather(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """`flat_table`; with a window, entries that no query reaches point one past the last page.

    Gathering there gives 0. Keys behind a window are masked, but the NaN of another sequence would
    get through.
    """
    table = flat_table(spec, operands)
    if first_reached(spec, operands) is None:
        return table
    return jnp.where(_is_reached(spec, operands), table, math.prod(spec.shape("key_pages")[:2]))


def _at_pages(
    spec: AttentionSpec, operands: Operands, name: str, table: jax.Array, *inside: jax.Array
) -> jax.Array:
    """The pages of keys or values that `table` names, or places in them; 0 past the last page."""
    page = table + (spec.meaning.value_page if name == "value" else 0)
    pages = flat_pages(operands[f"{name}_pages"]).at[(page, *inside)]
    if spec.band[0] is None and not spec.has("window"):
        return pages.get(mode="clip")
    return pages.get(mode="fill", fill_value=0)
