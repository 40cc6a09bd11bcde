"""A program with a call of FlashAttention, and its gradients, for tests/gpu."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import attn_dispatch
from tests.support.gpu_programs import arrays


def attend(q, k, v, implementation="flash", **options):
    options = {"is_causal": True} | options
    return attn_dispatch.dot_product_attention(q, k, v, implementation=implementation, **options)


def gradients(call):
    def step(q, k, v, out_grad):
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(out_grad)

    return jax.jit(step)


def assert_close(found, expected, tolerance=0.03):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() <= tolerance * max(1.0, np.abs(y).max())


def packed(q, k, v, implementation="flash"):
    ids = jnp.repeat(
        jnp.array([1, 2, 4, 0]), jnp.array([200, 130, 150, 32]), total_repeat_length=512
    )
    ids = jnp.broadcast_to(ids, q.shape[:2])
    options = {"query_segment_ids": ids, "max_segments": 4}
    return attend(q, k, v, implementation, **options)


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
