"""A cache as blocks of few keys each: pages cut into smaller ones, or an array's rows. No copy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.options import Meaning
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.pages import flat_pages, flat_table

_LARGEST = 64
"""Keys in a block: what is left of a row beside whole blocks is fewer, and is copied."""

_FEW_QUERIES = 4
"""Up to so many, blocks are the smallest. Kernels of a single tile read them as fast, and fewer
keys are left: a soft cap of one query takes 138 µs, and 144 with blocks of 64; but 16 queries take
199 and 172, a chunk of 256 1,229 and 1,079 (16 rows of 8,192 keys, 32 heads on 8, H200, 9.19)."""

_LARGEST_WHOLE = 256
"""The largest block where pages cannot be cut: with heads before keys, only the keys of one head
and one page follow one another."""

SMALLEST = 8
"""Below it nothing is cut."""

IN_BLOCKS = ("key_pages", "value_pages", "page_table")


@dataclass(frozen=True)
class Blocks:
    """How keys and values of a call lie in blocks."""

    size: int
    """Keys in a block, a power of two."""
    columns: int
    """Blocks that a batch row has room for."""
    number: int
    """Blocks that there are."""

    @staticmethod
    def of(spec: AttentionSpec) -> Blocks | None:
        """The blocks of a cache, in pages or not; None where it does not divide into any."""
        whole = spec.page_size if spec.is_paged else spec.seq_len_kv
        size = math.gcd(whole, SMALLEST if spec.seq_len_q <= _FEW_QUERIES else _LARGEST)
        if spec.is_paged and spec.meaning.heads_first_kv:
            size = whole if whole <= _LARGEST_WHOLE and whole.bit_count() == 1 else 1
        if not whole or (size < SMALLEST and size < whole):
            return None
        pages = math.prod(spec.shape("key_pages")[:2]) if spec.is_paged else spec.batch
        return Blocks(size, spec.seq_len_kv // size, pages * whole // size)

    def meaning(self, spec: AttentionSpec) -> Meaning:
        """That of the call in blocks. An array with heads first is copied."""
        if not spec.is_paged:
            return replace(spec.meaning, heads_first_kv=False)
        return replace(spec.meaning, value_page=spec.meaning.value_page * self._in_a_page(spec))

    def _in_a_page(self, spec: AttentionSpec) -> int:
        return spec.page_size // self.size

    def arrays(self, spec: AttentionSpec, columns: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the operands that say a call in blocks, so many for a row."""
        pool = (1, self.number, self.size, spec.num_kv_heads)
        return {
            "key_pages": ((*pool, spec.head_dim), spec.dtype),
            "value_pages": ((*pool, spec.head_dim_v), spec.dtype),
            "page_table": ((spec.batch, columns), "int32"),
        }

    def pools(self, spec: AttentionSpec, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """key_pages and value_pages [1, number, size, K, ·]."""
        found: dict[str, jax.Array] = {}
        for name in ("key", "value"):
            x = flat_pages(operands[f"{name}_pages"]) if spec.is_paged else operands[name]
            found[f"{name}_pages"] = x.reshape(1, self.number, self.size, *x.shape[2:])
        return found

    def table(self, spec: AttentionSpec, operands: dict[str, jax.Array]) -> jax.Array:
        """int32 [B, columns]: each row's blocks in order; anything past its length."""
        if spec.is_paged:
            whole = flat_table(spec, operands)
        else:
            whole = jnp.arange(spec.batch, dtype=jnp.int32)[:, None]
        each = self.columns // whole.shape[1]
        within = jnp.arange(each, dtype=jnp.int32)[None, None]
        return (whole[..., None] * each + within).reshape(spec.batch, self.columns)
