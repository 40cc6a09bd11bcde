"""Arrays in other layouts on a mesh, without a gather, and exported with a symbolic batch."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import dot_product_attention

_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attn_dispatch import dot_product_attention, paged_attention

q, k, pool = (jax.random.normal(jax.random.key(i), x) for i, x in
              enumerate(((4, 8, 16, 8), (4, 4, 16, 8), (6, 2, 4, 8, 8))))
table, lengths = jnp.array([[0, 1], [2, 3], [4, 5], [1, 2]]), jnp.array([16, 3, 9, 1])

def call(q, k):
    return dot_product_attention(q, k, k, is_causal=True, qkv_layout="BNTH")

def both(q, k):
    out, pull = jax.vjp(call, q, k)
    return out, *pull(jnp.sin(out))

def paged(q, pool):
    return paged_attention(q, pool, None, table, lengths, kv_layout="HND")

step = q[:, :, :1].swapaxes(1, 2)
expected = jax.jit(both)(q, k), jax.jit(paged)(step, pool)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        given = [(put(q, "d", "m"), put(k, "d", "m")),
                 (put(step, "d", None, "m"), put(pool, None, None, "m"))]
        for function, arrays, wanted in zip((both, paged), given, expected):
            compiled = jax.jit(function).lower(*arrays).compile()
            assert "all-gather" not in compiled.as_text(), (kind, function)
            assert "all-to-all" not in compiled.as_text(), (kind, function)
            found = compiled(*arrays)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, wanted)
            out = found[0] if function is both else found
            assert tuple(out.sharding.spec)[:3] in [("d", "m"), ("d", "m", None), ("d", None, "m")]
"""


def test_layouts_on_a_mesh_need_no_gather():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_bnth_call_exports_with_a_symbolic_batch():
    def call(q, k):
        return dot_product_attention(q, k, k, qkv_layout="BNTH")

    (b,) = jax.export.symbolic_shape("b")
    given = [jax.ShapeDtypeStruct((b, n, 6, 8), jnp.float32) for n in (4, 2)]
    exported = jax.export.export(jax.jit(call))(*given)
    arrays = [np.random.default_rng(n).standard_normal((3, n, 6, 8), np.float32) for n in (4, 2)]
    np.testing.assert_allclose(exported.call(*arrays), call(*arrays), atol=1e-6)
