"""A paged cache in programs: a loop of decoding steps, memory, and pools that are not copied."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, paged_attention, serving
from tests.support.gpu_programs import assert_calls_do_not_grow_memory
from tests.support.present import present

SLOTS, PAGES, PAGE, N, K, H = 6, 600, 16, 8, 2, 64


def drawn(seed: Any, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def cache(lengths: list[int]) -> tuple[serving.PageTables, list[jax.Array]]:
    tables = serving.grow(serving.new_tables(SLOTS, 64, PAGES, PAGE), np.array(lengths))
    pools = []
    for seed in (1, 2):
        pages = serving.new_pages(PAGES, PAGE, K, H, jnp.bfloat16) * jnp.nan
        new = drawn(seed, SLOTS, max(lengths), K, H)
        pools.append(serving.write(pages, new, tables, np.array(lengths)))
    return tables, pools


@functools.partial(jax.jit, static_argnames=("implementation", "steps", "t"), donate_argnums=1)
def decode(tables, pools, implementation, steps, t):
    """Decoding steps with drawn queries. Using the last results instead would amplify rounding."""

    def step(carry, seed):
        tables, pools = carry
        tables = serving.grow(tables, jnp.full(SLOTS, t))
        pools = [
            serving.write(pool, drawn(3 * seed + i, SLOTS, t, K, H), tables)
            for i, pool in enumerate(pools)
        ]
        query = drawn(3 * seed + 2, SLOTS, t, N, H)
        out = paged_attention(
            query, *pools, tables.table, tables.lengths, implementation=implementation
        )
        return (tables, pools), out

    return jax.lax.scan(step, (tables, pools), jnp.arange(100, 100 + steps))


@pytest.mark.parametrize("t", [1, 4])
def test_a_loop_of_decoding_steps_agrees_with_xla(t, record):
    lengths = [500, 0, 1, 16, 33, 400]
    found, expected = (
        decode(*cache(lengths), implementation, 40, t)[1] for implementation in ("cudnn", "xla")
    )
    worst = float(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)).max())
    record(t=t, worst=worst)
    assert worst < 0.05


def test_pools_are_written_and_read_in_place(record):
    """A loop does not copy a pool either: the program needs little other memory."""
    tables, pools = cache([500, 0, 1, 16, 33, 400])
    needed = present(decode.lower(tables, pools, "cudnn", 40, 1).compile().memory_analysis())
    record(temporary=needed.temp_size_in_bytes, pool=pools[0].nbytes)
    assert needed.temp_size_in_bytes < pools[0].nbytes / 2


def test_300_steps_do_not_grow_memory(record):
    tables, pools = cache([100] * SLOTS)
    step = jax.jit(paged_attention)
    given = drawn(3, SLOTS, 1, N, H), *pools, tables.table, tables.lengths
    assert_calls_do_not_grow_memory(step, given, 300, record)


def test_a_cache_as_an_array_is_not_copied(record):
    """A call with key lengths makes no array as large as the cache."""
    query, key, value = drawn(1, 4, 1, N, H), drawn(2, 4, 8192, K, H), drawn(3, 4, 8192, K, H)
    lengths = jnp.array([8192, 0, 1, 5000], jnp.int32)

    def call(q, k, v, n, name="cudnn"):
        return dot_product_attention(q, k, v, key_value_seq_lengths=n, implementation=name)

    compiled = jax.jit(call).lower(query, key, value, lengths).compile()
    needed = present(compiled.memory_analysis())
    record(temporary=needed.temp_size_in_bytes, key=key.nbytes)
    assert needed.temp_size_in_bytes < key.nbytes / 8
    past = jnp.arange(8192)[None, :, None, None] >= lengths[:, None, None, None]
    poisoned = [jnp.where(past, jnp.nan, x) for x in (key, value)]
    found = jax.jit(call)(query, *poisoned, lengths)
    expected = call(query, key, value, lengths, "xla")
    assert float(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)).max()) < 0.02
