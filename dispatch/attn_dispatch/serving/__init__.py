"""A paged cache of keys and values, for `attn_dispatch.paged_attention`.

`PageTables` says which pages belong to which sequence; pages themselves are arrays of the caller's,
one for the keys and one for the values of each layer, all by the same tables. Everything is a
function of arrays, of static shapes: it may be jitted, with the pages donated, so that they are
written in place.
"""

from attn_dispatch.semantics.merge import merged as merge
from attn_dispatch.serving.pages import copy_pages, new_pages, write
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
from attn_dispatch.serving.windows import free_behind

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
    "share_prefix",
    "shrink",
    "write",
]
