"""A paged cache of keys and values, for `attn_dispatch.paged_attention`.

`PageTables` says which pages belong to which sequence. The pages themselves are your arrays: one
for the keys and one for the values of each layer, all with the same tables. One decoding step:

    tables = serving.grow(tables, tokens)  # room for each sequence's new keys
    key_pages = serving.write(key_pages, k, tables)
    value_pages = serving.write(value_pages, v, tables)
    out = paged_attention(q, key_pages, value_pages, tables.table, tables.lengths)

All functions are pure and all shapes static, so a step can be jitted. Donate the pages, so that
they are written in place.
"""

from typing import TYPE_CHECKING, Never

from attn_dispatch.choices import missing
from attn_dispatch.semantics.merge import merged as merge
from attn_dispatch.serving.freeing import free_behind
from attn_dispatch.serving.pages import copy_pages, new_pages, write
from attn_dispatch.serving.reordering import reorder
from attn_dispatch.serving.sharing import fork, share_prefix
from attn_dispatch.serving.tables import (
    OutOfPages,
    PageTables,
    free,
    grow,
    new_tables,
    raise_if_failed,
    recovered,
    shrink,
)

__all__ = [
    "OutOfPages",
    "PageTables",
    "copy_pages",
    "fork",
    "free",
    "free_behind",
    "grow",
    "merge",
    "new_pages",
    "new_tables",
    "raise_if_failed",
    "recovered",
    "reorder",
    "share_prefix",
    "shrink",
    "write",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the module

    def __getattr__(name: str) -> Never:
        raise missing(__name__, name, __all__)
