"""A small cache in pages, NaN wherever it must not be read, and the same cache as arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import paged_attention

B, N, K, H, V, PAGE, PAGES = 3, 4, 2, 16, 24, 8, 5


LENGTHS = np.array([33, 0, 40], np.int32)


def cache(dtype: Any = jnp.float32, seed: int = 0) -> tuple[Any, ...]:
    """key [B, S, K, H], value, both again in pages with NaN past the lengths, and the table."""
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((B, PAGE * PAGES, K, d)) for d in (H, V))
    table = rng.permutation(B * PAGES + 2)[: B * PAGES].reshape(B, PAGES).astype(np.int32)
    in_pages = []
    for x in (key, value):
        pages = np.full((B * PAGES + 2, PAGE, K, x.shape[-1]), np.nan)
        hidden = np.arange(PAGE * PAGES)[None, :, None, None] >= LENGTHS[:, None, None, None]
        pages[table] = np.where(hidden, np.nan, x).reshape(B, PAGES, PAGE, K, -1)
        in_pages.append(jnp.asarray(pages, dtype))
    table = np.where(np.arange(PAGES) * PAGE < LENGTHS[:, None], table, -999)
    return jnp.asarray(key, dtype), jnp.asarray(value, dtype), *in_pages, table.astype(np.int32)


def queries(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).standard_normal((*shape, N, H)), dtype)


def attend_in_pages(query: jax.Array, **options: Any) -> Any:
    _, _, *pages = cache()
    return paged_attention(query, *pages, LENGTHS, **options)
