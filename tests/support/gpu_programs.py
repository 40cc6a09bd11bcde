"""Programs with a call of one kernel, memory in use, and new processes, for tests/gpu."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attn_dispatch
from tests.support.repository import ROOT


def arrays(seed: int, b=2, t=512, n=8, k=2, h=64):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((b, t, n, h), (b, t, k, h), (b, t, k, h), (b, t, n, h))
    return [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


def attend(q, k, v, implementation="cudnn", **options):
    options = {"is_causal": True} | options
    return attn_dispatch.dot_product_attention(q, k, v, implementation=implementation, **options)


def packed(q, k, v, implementation="cudnn"):
    """Each row has four sequences, the third without tokens, and padding at the end."""
    ids = jnp.repeat(
        jnp.array([1, 2, 4, 0]), jnp.array([200, 130, 150, 32]), total_repeat_length=512
    )
    ids = jnp.broadcast_to(ids, q.shape[:2])
    return attend(q, k, v, implementation, query_segment_ids=ids, max_segments=4)


def gradients(call, name="step"):
    """A program of this name: the result of a call of query, key and value, and their gradients."""

    def step(q, k, v, out_grad):
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(out_grad)

    step.__name__ = name
    return jax.jit(step)


step, step_packed = gradients(attend), gradients(packed, "step_packed")


def assert_close(found, expected, tolerance=0.03):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() <= tolerance * max(1.0, np.abs(y).max())


def device_bytes_in_use() -> int:
    """All memory in use on the device: XLA's pool and that of every other process."""
    driver = ctypes.CDLL("libcuda.so.1")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value


def pool_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    return stats.get("pool_bytes") or stats["bytes_reserved"]


def assert_calls_do_not_grow_memory(
    step: Callable[..., Any], operands: Any, calls: int, record: Callable[..., None], **facts: Any
) -> None:
    """Memory outside XLA's pool is the same after so many calls, without waiting between them."""
    for _ in range(20):
        jax.block_until_ready(step(*operands))
    before, results = device_bytes_in_use() - pool_bytes(), None
    for _ in range(calls):
        results = step(*operands)
    jax.block_until_ready(results)
    after = device_bytes_in_use() - pool_bytes()
    record(**facts, calls=calls, outside_pool_before=before, outside_pool_after=after)
    assert after <= before


def in_new_process(code: str, xla_flags: str) -> str:
    """Run code in a process with these XLA flags and return its output. It can import `tests`."""
    code = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT],
        env={**os.environ, "XLA_FLAGS": xla_flags}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_exported(call, targets, register: str, folder: Path) -> None:
    """Another process, which calls a public function of this name first, runs an exported module.

    Args:
      call: a function of query, key and value.
      targets: the names of the custom calls in the module.
      register: the public function that registers them.
      folder: where the module and its arrays are written.
    """
    checks = [jax.export.DisabledSafetyCheck.custom_call(x) for x in targets]
    operands = arrays(4)
    exported = jax.export.export(gradients(call), disabled_checks=checks)(*operands)
    (folder / "module").write_bytes(exported.serialize())
    expected = np.asarray(exported.call(*operands)[1], np.float32)
    np.savez(folder / "arrays", *[np.asarray(x, np.float32) for x in operands], expected)
    code = f"""
        import jax, jax.numpy as jnp, numpy as np, attn_dispatch
        attn_dispatch.{register}()
        *given, expected = np.load({str(folder / "arrays.npz")!r}).values()
        module = jax.export.deserialize(open({str(folder / "module")!r}, "rb").read())
        found = module.call(*[jnp.asarray(x, jnp.bfloat16) for x in given])[1]
        assert np.abs(np.asarray(found, np.float32) - expected).max() < 0.02
    """
    subprocess.run((sys.executable, "-c", textwrap.dedent(code)), check=True)
