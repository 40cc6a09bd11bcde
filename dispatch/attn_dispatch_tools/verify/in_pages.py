"""A case as a paged call: its options, and its arrays with keys and values in pages."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.paged_arguments import first_of_both
from attn_dispatch_tools.verify.case import Case

_UNUSED = 3
"""The number of pages that belong to no row."""

_NO_PAGES = (-7, 2**30)
"""Invalid page numbers, which alternate in the table past a length."""


def paged_options(case: Case, options: AttentionOptions) -> AttentionOptions:
    """The options of the call with key and value in pages."""
    names = tuple(f"{x}_pages" if x in ("key", "value") else x for x in options.operands)
    meaning = replace(options.meaning, value_page=int(case.one_pool))
    return replace(options, operands=(*names, "page_table"), meaning=meaning)


def in_pages(case: Case, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The operands of the paged call: pages in any order; pages that belong to no row hold NaN."""
    rows, pages = arrays["key"].shape[0], case.s // case.page
    rng = np.random.RandomState(zlib.crc32(b"pages of " + case.name.encode()))
    table = rng.permutation(rows * pages + _UNUSED)[: rows * pages].reshape(rows, pages)
    # A page that several rows share has the keys of the longest valid row.
    owner = 0
    if case.shared_pages:
        assert case.kv_lengths is not None
        queries = case.q_lengths or (0,) * len(case.kv_lengths)
        lengths = zip(case.kv_lengths, queries, strict=True)
        owner = int(np.argmax([x if x <= case.s and 0 <= y <= case.t else -1 for x, y in lengths]))
        table[:, : case.shared_pages] = table[owner, : case.shared_pages]
    others = [row for row in range(rows) if row != owner]
    # One gather fills all pages; writing them row by row would compile many programs.
    held = np.full(rows * pages + _UNUSED, -1)
    for row in (*others, owner):
        held[table[row]] = row * pages + np.arange(pages)
    is_held, held = (held >= 0)[:, None, None, None], np.maximum(held, 0)
    found = {name: x for name, x in arrays.items() if name not in ("key", "value")}
    for name in ("key", "value"):
        x = arrays[name].reshape(rows * pages, case.page, *arrays[name].shape[2:])
        x = jnp.asarray(x).at[held].get(mode="promise_in_bounds")
        found[f"{name}_pages"] = jnp.where(is_held, x, jnp.nan)[None]
    ends = arrays["key_value_seq_lengths"][:, None]
    is_read = jnp.arange(pages)[None] * case.page < ends
    strange = np.resize(np.array(_NO_PAGES, np.int32), (rows, pages))
    found["page_table"] = jnp.where(is_read, jnp.asarray(table, jnp.int32), strange)
    return _in_one_pool(found) if case.one_pool else found


def _in_one_pool(found: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One pool of pages, in which the page of its values follows each page of keys."""
    both = jnp.stack([found["key_pages"], found["value_pages"]], axis=2)
    pool = both.reshape(1, -1, *both.shape[3:])
    table = first_of_both(found["page_table"], pool.shape[1])
    return found | {"key_pages": pool, "value_pages": pool, "page_table": table}
