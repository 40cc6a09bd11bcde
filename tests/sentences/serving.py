"""`attn_dispatch.serving`"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import paged_attention, serving

ONE = np.array([1, 0, 0, 0])
POOL = np.zeros((15, 4, 2, 8), np.float32)
PAIR = np.zeros((15, 2, 4, 2, 8), np.float32)
"""A pool of keys and values."""
TABLES = serving.new_tables(slots=4, pages_per_slot=6, num_pages=15, page_size=4)
MOVED = serving.reorder(TABLES, [0, 0, 0, 0])
"""What reorder returns: tables, and pages to copy."""


def new(*shape: int) -> np.ndarray:
    """Keys or values, as write takes them."""
    return np.zeros((*shape, 2, 8), np.float32)


def grown(*tokens: int) -> serving.PageTables:
    return serving.grow(TABLES, tokens)


def attention(table: Any) -> jax.Array:
    return paged_attention(new(4, 1), POOL, POOL, table, np.ones(4, int))


ROWS = """
# new_tables, new_pages
serving.new_tables(0, 1, 1, 1)
serving.new_tables(2.5, 1, 1, 1)
serving.new_pages(0, 1, 1, 1, "float32")

# grow, shrink, free
serving.grow(TABLES, 1)
serving.grow(TABLES, [1, 2])
serving.grow(TABLES, np.ones(4))
serving.grow(TABLES, [-1, 0, 0, 0])
serving.grow(TABLES, [25, 0, 0, 0])
serving.grow(TABLES, [20] * 4)
serving.shrink(TABLES, [-1, 0, 0, 0])
serving.free(TABLES, 0)
serving.free(TABLES, [1, 0, 0, 0])
serving.free_behind(TABLES, 2.5)
serving.free_behind(TABLES, (4, 0))
serving.free_behind(TABLES, None)
serving.free_behind(TABLES, -3)
serving.free_behind(TABLES, 3, [1])

# share_prefix, fork, reorder, copy_pages
serving.share_prefix(TABLES, 1, 1, 8)
serving.share_prefix(TABLES, 0, 4, 8)
serving.share_prefix(TABLES, 0, 1, -8)
serving.share_prefix(TABLES, [0], 1, 8)
serving.fork(TABLES, 0.0, 1)
serving.reorder(TABLES, ONE > 0)
serving.reorder(TABLES, ONE[:2])
serving.copy_pages(POOL, 15, 0)
serving.copy_pages(POOL, 0, -1)
serving.copy_pages(POOL, [0, 1], 2)

# write
serving.write(TABLES, new(4, 1), POOL)
serving.write(POOL, np.zeros((4, 1, 2, 9)), TABLES)
serving.write(POOL, new(4, 1), TABLES, cu_seqlens=[0, 1, 2, 3, 4])
serving.write(new(15, 8), new(4, 1), TABLES)
serving.write(POOL[:3], new(4, 1), TABLES)
serving.write(POOL, new(4, 1), TABLES, [2, 0, 0, 0])
serving.write(POOL, new(4, 1), TABLES, [1])
serving.write(POOL, new(3), TABLES, cu_seqlens=[0, 2, 1, 1, 3])
serving.write(POOL, new(3), TABLES, cu_seqlens=[0, 2, 2, 2, 4])
serving.write(POOL, new(4, 2), grown(2, 1, 0, 0), [2, 2, 0, 0])
serving.write(POOL, new(4, 1), grown(1, 1, 0, 1))
serving.write(POOL, new(3), TABLES, cu_seqlens=[0, 0, 3, 3, 3])
serving.write(PAIR, new(4, 1), TABLES)
serving.write(PAIR, (new(4, 1), new(3, 1)), TABLES)
serving.write(POOL, (new(4, 1), new(4, 1)), TABLES)
serving.write(POOL, new(4, 1), TABLES, kv_layout="HND")

# merge
serving.merge(*[jnp.ones((2, 1, 4, 8)), jnp.ones((2, 4, 1))] * 2)
serving.merge(*[jnp.ones((2, 4, 8)), jnp.ones((2, 4))] * 2, jnp.ones(8))

# what is not PageTables, and PageTables in place of their table
serving.grow(MOVED, ONE)
serving.shrink(MOVED, ONE)
serving.free(MOVED, ONE > 0)
serving.free_behind(MOVED, 1)
serving.share_prefix(MOVED, 0, 1, 4)
serving.fork(MOVED, 0, 1)
serving.reorder(MOVED, [0, 0, 0, 0])
serving.write(POOL, new(4, 1), MOVED)
serving.raise_if_failed(MOVED)
serving.recovered(MOVED)
serving.grow(ONE, ONE)
serving.shrink(ONE, ONE)
serving.free(ONE, ONE > 0)
serving.free_behind(ONE, 1)
serving.share_prefix(ONE, 0, 1, 4)
serving.fork(ONE, 0, 1)
serving.reorder(ONE, [0, 0, 0, 0])
serving.write(POOL, new(4, 1), ONE)
serving.raise_if_failed(ONE)
serving.recovered(ONE)
attention(TABLES)
attention(jax.eval_shape(lambda: TABLES))

# names
serving.free_behnd
serving.beam
"""
