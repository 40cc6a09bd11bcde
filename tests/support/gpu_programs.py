"""Programs with a call of cuDNN, memory in use, and new processes, for tests/gpu."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp

import attn_dispatch
from tests.support.repository import ROOT


def arrays(seed: int, b=2, t=512, n=8, k=2, h=64):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((b, t, n, h), (b, t, k, h), (b, t, k, h), (b, t, n, h))
    return [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


def attend(q, k, v):
    return attn_dispatch.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


@jax.jit
def step(q, k, v, out_grad):
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(out_grad)


def attend_packed(q, k, v):
    """Each row has four sequences, the third without tokens, and padding at the end."""
    ids = jnp.repeat(
        jnp.array([1, 2, 4, 0]), jnp.array([200, 130, 150, 32]), total_repeat_length=512
    )
    ids = jnp.broadcast_to(ids, q.shape[:2])
    return attn_dispatch.dot_product_attention(
        q, k, v, query_segment_ids=ids, max_segments=4, is_causal=True, implementation="cudnn"
    )


@jax.jit
def step_packed(q, k, v, out_grad):
    out, pull = jax.vjp(attend_packed, q, k, v)
    return out, *pull(out_grad)


def device_bytes_in_use() -> int:
    """All memory in use on the device: XLA's pool and that of every other process."""
    driver = ctypes.CDLL("libcuda.so.1")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value


def pool_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    return stats.get("pool_bytes") or stats["bytes_reserved"]


def in_new_process(code: str, xla_flags: str) -> str:
    """Run code in a process with these XLA flags and return its output. It can import `tests`."""
    code = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT],
        env={**os.environ, "XLA_FLAGS": xla_flags}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
