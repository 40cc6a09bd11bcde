"""A cache divided into blocks of a few keys, without a copy: pages cut up, or rows of an array."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import with_role
from attn_dispatch.call.options import Meaning
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.pages import flat_pages, flat_table

_LARGEST = 64
"""The most keys in a block. The keys of a row beyond its whole blocks are fewer; they are copied.
"""

_FEW_QUERIES = 4
"""The most queries for which blocks have the smallest size. Kernels with a single tile of queries
read small blocks as fast as large ones, and fewer keys remain beyond whole blocks.

With a soft cap, one query takes 138 µs with small blocks and 144 µs with blocks of 64 keys; but 16
queries take 199 and 172 µs, and a chunk of 256 queries takes 1,229 and 1,079 µs (16 rows of 8,192
keys, 32 heads on 8, H200, cuDNN 9.19)."""

_LARGEST_WHOLE = 256
"""The largest block if pages cannot be cut, because heads lie before keys in memory: then only the
keys of one head of one page are contiguous."""

SMALLEST = 8
"""The fewest keys in a block that is cut from a page or a row."""

IN_BLOCKS = with_role("pages")


@dataclass(frozen=True)
class Blocks:
    """The division of a call's keys and values into blocks."""

    size: int
    """The number of keys in a block, a power of two."""
    columns: int
    """The number of blocks that a batch row has room for."""
    number: int
    """The number of blocks in the whole cache."""

    @staticmethod
    def of(spec: AttentionSpec) -> Blocks | None:
        """The blocks of a call's cache, in pages or not; None if it cannot be divided."""
        whole = spec.page_size if spec.is_paged else spec.seq_len_kv
        size = math.gcd(whole, SMALLEST if spec.seq_len_q <= _FEW_QUERIES else _LARGEST)
        if spec.is_paged and spec.meaning.heads_first_kv:
            size = whole if whole <= _LARGEST_WHOLE and whole.bit_count() == 1 else 1
        if not whole or (size < SMALLEST and size < whole):
            return None
        pages = math.prod(spec.shape("key_pages")[:2]) if spec.is_paged else spec.batch
        return Blocks(size, spec.seq_len_kv // size, pages * whole // size)

    def meaning(self, spec: AttentionSpec) -> Meaning:
        """The meaning of the call on blocks. An array with heads first in memory is copied."""
        if not spec.is_paged:
            return replace(spec.meaning, heads_first_kv=False)
        return replace(spec.meaning, value_page=spec.meaning.value_page * self._in_a_page(spec))

    def _in_a_page(self, spec: AttentionSpec) -> int:
        return spec.page_size // self.size

    def sizes(self, columns: int) -> dict[str, int]:
        """The sizes of pages with a block in each, and of a table with this many columns."""
        return {"c": 1, "p": self.number, "e": self.size, "m": columns}

    def pools(self, spec: AttentionSpec, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """key_pages and value_pages [1, number, size, K, ·]."""
        found: dict[str, jax.Array] = {}
        for name in ("key", "value"):
            x = flat_pages(operands[f"{name}_pages"]) if spec.is_paged else operands[name]
            found[f"{name}_pages"] = x.reshape(1, self.number, self.size, *x.shape[2:])
        return found

    def table(self, spec: AttentionSpec, operands: dict[str, jax.Array]) -> jax.Array:
        """int32 [B, columns]: each row's blocks in order; past the row's length, any block."""
        if spec.is_paged:
            whole = flat_table(spec, operands)
        else:
            whole = jnp.arange(spec.batch, dtype=jnp.int32)[:, None]
        each = self.columns // whole.shape[1]
        within = jnp.arange(each, dtype=jnp.int32)[None, None]
        return (whole[..., None] * each + within).reshape(spec.batch, self.columns)
