"""Programs as nodes of cuDNN's graph: what they compute, and what cannot be said."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import explain, mods
from attn_dispatch.programs.kernel import KernelProgram, kernel_program
from attn_dispatch.programs.nodes import Outside
from attn_dispatch.programs.tracing import trace
from attn_dispatch.semantics.mods import outside
from attn_dispatch.semantics.pair_indices import PairIndices
from backend import needs_cudnn
from drawn_mods import DrawnMod, drawn
from nodes_in_numpy import run


def kernel_of(mod: DrawnMod, *, is_backward: bool) -> KernelProgram | str:
    score_mod = trace("score_mod", mod.score_mod, mod.arrays, "float32").program
    mask_mod = None
    if mod.mask_mod is not None:
        mask_mod = trace("mask_mod", mod.mask_mod, mod.mask_arrays, "float32").program
    return kernel_program(
        score_mod,
        mask_mod,
        first_row=0,
        band=(None, 0) if mod.is_causal else (None, None),
        lengths=(mod.sizes.t, mod.sizes.s),
        is_backward=is_backward,
    )


def array_of(mod: DrawnMod, made: Outside) -> np.ndarray:
    z = mod.sizes
    b, n, t, s = (jnp.arange(x, dtype=jnp.int32) for x in (z.b, z.n, z.t, z.s))
    indices = PairIndices(jnp.zeros(z.b, jnp.int32), b[:, None], n[None], t[None], s[None])
    read = mod.arrays if made.mod == "score_mod" else mod.mask_arrays
    found = outside(made, indices, [jnp.asarray(x)[None] for x in read])
    return np.asarray(found).astype(np.float64 if made.dtype == "float32" else np.int32)


@pytest.mark.parametrize("seed", range(24))
def test_nodes_compute_what_the_function_does(seed: int):
    mod = drawn(seed)
    kernel = kernel_of(mod, is_backward=True)
    if isinstance(kernel, str):
        assert "read by s" in kernel
        kernel = kernel_of(mod, is_backward=False)
    assert isinstance(kernel, KernelProgram)
    z, rng = mod.sizes, np.random.default_rng(seed)
    x, g = (rng.standard_normal((z.b, z.n, z.t, z.s)) for _ in range(2))
    b, n, t, s = np.ogrid[: z.b, : z.n, : z.t, : z.s]
    known: dict[str, Any] = {"x": x, "g": g, "t": t, "s": s}
    known |= {f"o{i}": array_of(mod, made) for i, made in enumerate(kernel.outside)}
    got = run(kernel.forward, known)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in mod.arrays]
        places = [jnp.asarray(x) for x in (b, n, t, s)]
        score, pull = jax.vjp(lambda x: mod.score_mod(x, *places, *arrays), jnp.asarray(x))
        (grad,) = pull(jnp.asarray(g))
    may = np.ones(x.shape, bool)
    if mod.mask_mod is not None:
        may &= np.asarray(mod.mask_mod(b, n, t, s, *mod.mask_arrays))
    np.testing.assert_array_equal(got == -np.inf, ~may)
    np.testing.assert_allclose(got[may], np.asarray(score)[may], rtol=1e-4, atol=1e-4)
    if kernel.backward:
        found = run(kernel.backward, known)
        may &= (s <= t) | (not mod.is_causal)
        np.testing.assert_allclose(found[may], np.asarray(grad)[may], rtol=1e-4, atol=1e-4)
        assert np.isfinite(found).all()


SLOPES = jnp.arange(4.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, b, n, t, s: jnp.where(x > 0, x, 0.0), "gt compares floats"),
        (lambda x, b, n, t, s: x + SLOPES[jnp.clip(t - s, 0, 3)], "depends on both t and s"),
        (lambda x, b, n, t, s: x + (t - s) % 3, "rem"),
        (lambda x, b, n, t, s: jax.lax.fori_loop(0, t, lambda i, v: v * 0.9, x), "while"),
        (lambda x, b, n, t, s: jax.lax.fori_loop(0, 3, lambda i, v: v * 0.9, x), "scan"),
        (lambda x, b, n, t, s: x.astype(jnp.bfloat16) * 2, "in bfloat16"),
        (lambda x, b, n, t, s: x + (t - s).astype(jnp.int8), "in int8"),
        (lambda x, b, n, t, s: jax.lax.reduce_precision(x, 8, 7), "reduce_precision"),
        (lambda x, b, n, t, s: jax.lax.cond(t > s, jnp.tanh, jnp.sin, x), "cond"),
        (lambda x, b, n, t, s: jax.lax.cumsum(jnp.stack([x, x]))[1], "of arrays"),
    ],
)
def test_what_cannot_be_said(function, message: str):
    program = trace("score_mod", function, (), "float32").program
    why = kernel_program(
        program, None, first_row=0, band=(None, None), lengths=(8, 8), is_backward=False
    )
    assert isinstance(why, str) and message in why


@needs_cudnn
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "sm120"])
def test_cudnn_plans_mods(target: str):
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    found = explain(
        x, x, x, target=target, score_mod=mods.soft_cap(20.0), is_causal=True,
        mask_mod=mods.prefix_lm(jnp.array([3, 9])),
    )  # fmt: skip
    # The prefix is a vector of rows, of which lse and delta are all that these have room for.
    backward = "xla" if target in ("sm80", "sm120") else "cudnn"
    assert (found.chosen_forward, found.chosen_backward) == ("cudnn", backward)
    # What an array is added to needs no kernel for its gradient.
    found = explain(x, x, x, target=target, score_mod=mods.alibi(SLOPES), is_causal=True)
    assert (found.chosen_forward, found.chosen_backward) == ("cudnn", "cudnn")
    assert "the gradients of what score_mod reads" in str(found)
