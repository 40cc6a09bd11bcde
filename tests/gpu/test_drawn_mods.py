"""Drawn score_mods and mask_mods through cuDNN, against float64."""

from __future__ import annotations

import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import dot_product_attention
from drawn_mods import DrawnMod, drawn

FIRST = int(os.environ.get("ATTN_DISPATCH_TEST_FIRST_MOD", "0"))
COUNT = int(os.environ.get("ATTN_DISPATCH_TEST_MODS", "24"))


def results(call, mod: DrawnMod, dtype) -> dict[str, np.ndarray]:
    """out and the gradients of query, key, value and the arrays, of call(q, k, v, *arrays)."""
    given = mod.operands()
    arrays = [jnp.asarray(given[x], dtype) for x in ("query", "key", "value")]
    wide = jnp.promote_types(dtype, jnp.float32)
    arrays += [jnp.asarray(x, wide) for x in mod.arrays]
    out, pull = jax.vjp(call, *arrays)
    grads = pull(jnp.asarray(given["out_grad"], out.dtype))
    names = ("query", "key", "value", *(f"array {i}" for i in range(len(mod.arrays))))
    found = {"out": out, **dict(zip(names, grads, strict=True))}
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def wrong(mod: DrawnMod) -> list[str]:
    """What is further from float64 than what rounding does to the call written out."""

    def ours(q, k, v, *arrays):
        return dot_product_attention(
            q, k, v, is_causal=mod.is_causal, score_mod=mod.score_mod, score_mod_args=arrays,
            mask_mod=mod.mask_mod, mask_mod_args=mod.mask_arrays, implementation="cudnn",
        )  # fmt: skip

    def written_out(q, k, v, *arrays, narrow=None):
        return mod.with_arrays(arrays).written_out(q, k, v, narrow)

    got = results(jax.jit(ours), mod, mod.dtype)
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        exact = results(jax.jit(written_out), mod, jnp.float64)
    with jax.default_device(jax.devices("cpu")[0]):
        rounded = jax.jit(lambda *x: written_out(*x, narrow=mod.dtype))
        plain = results(rounded, mod, jnp.float32)
    failures = []
    unit = float(jnp.finfo(mod.dtype).eps)
    for name, expected in exact.items():
        size = np.abs(expected).max()
        # A kernel takes delta from the output as it was rounded.
        allowed = 0.5 * unit + 4 * np.abs(plain[name] - expected).max() + 4 * unit * size + 1e-5
        error = np.abs(got[name] - expected).max()
        if not error <= allowed:
            failures.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}, size {size:.3g}")
    return failures


def test_drawn_mods(record):
    counts, failed, reasons = Counter(), {}, Counter()
    for seed in range(FIRST, FIRST + COUNT):
        mod = drawn(seed)
        try:
            failures = wrong(mod)
        except NotImplementedError as error:
            counts["refused"] += 1
            reasons[str(error).splitlines()[1].strip()[:120]] += 1
            continue
        counts["failed" if failures else "passed"] += 1
        if failures:
            failed[seed] = [*failures, str(mod.sizes), mod.dtype, *mod.lines]
    record(first=FIRST, counts=dict(counts), reasons=dict(reasons), failures=failed)
    assert not failed, failed
    assert counts["passed"] >= COUNT // 3
