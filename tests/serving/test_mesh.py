"""A step of serving on a mesh: pools are split along kv heads, and devices exchange nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_STEP = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attn_dispatch import paged_attention, serving

devices, kind, window = 8, AxisType[sys.argv[1]], int(sys.argv[2])
B, N, K, H, PAGE, PAGES, M = 3, 16, 8, 16, 8, 30, 8
rng = np.random.default_rng(0)
drawn = lambda *shape: rng.standard_normal(shape).astype(np.float32)
given = [(drawn(B, t, N, H), drawn(B, t, K, H), drawn(B, t, K, H)) for t in (9, 30, 1, 4, 1)]
numbers = [np.minimum([t, max(t - 3, 0), 0], t) for t in (9, 30, 1, 4, 1)]


def step(pools, tables, query, key, value, tokens):
    tables = serving.grow(tables, tokens)
    pools = [serving.write(x, new, tables, tokens) for x, new in zip(pools, (key, value))]
    out = paged_attention(
        query, *pools, tables.table, tables.lengths, query_seq_lengths=tokens,
        local_window_size=(window, 0) if window else None,
    )
    return out, pools, serving.free_behind(tables, window) if window else tables


def run(place, sharding, jitted):
    tables = serving.new_tables(B, M, PAGES, PAGE)
    pools = [serving.new_pages(PAGES, PAGE, K, H, jnp.float32, sharding) for _ in range(2)]
    outs = []
    for arrays, tokens in zip(given, numbers):
        arrays = [place(x) for x in arrays]
        if sharding is not None:
            compiled = jitted.lower(pools, tables, *arrays, tokens).compile()
            text = compiled.as_text()
            words = ("all-gather", "all-reduce", "all-to-all", "permute", "reduce-scatter")
            assert not [x for x in words if x in text], text
            # Both pools come back where they were: results 1 and 2 of the step.
            assert all(f"{{{i + 1}}}: ({i}, {{}}" in text for i in range(2)), text[:2000]
        before = [x.unsafe_buffer_pointer() if sharding is None else
                  x.addressable_shards[3].data.unsafe_buffer_pointer() for x in pools]
        out, pools, tables = jitted(pools, tables, *arrays, tokens)
        after = [x.unsafe_buffer_pointer() if sharding is None else
                 x.addressable_shards[3].data.unsafe_buffer_pointer() for x in pools]
        assert before == after, "copied"
        if sharding is not None:
            assert {x.sharding.shard_shape(x.shape)[2] for x in pools} == {K // devices}
            assert out.sharding.shard_shape(out.shape)[2] == N // devices
        outs.append(np.asarray(out))
    serving.raise_if_failed(tables)
    return outs, int(tables.free_pages)


jitted = jax.jit(step, donate_argnums=0)
expected, free = run(jnp.asarray, None, jitted)
mesh = jax.make_mesh((devices,), ("model",), axis_types=(kind,))
with jax.set_mesh(mesh):
    heads = NamedSharding(mesh, P(None, None, "model"))
    found, free_too = run(lambda x: jax.device_put(x, heads), heads, jitted)
assert free == free_too
for x, y in zip(found, expected):
    np.testing.assert_allclose(x, y, atol=2e-6)
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("window", [0, 10])
def test_a_step_on_eight_devices_agrees_with_one_and_needs_no_collectives(kind, window):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        (sys.executable, "-c", _STEP, kind, str(window)),
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
