"""JAX's debug modes and strict promotion: calls run under them as usual."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, ragged_dot_product_attention, target

_rng = np.random.default_rng(0)
Q, K, V = (
    _rng.standard_normal(shape).astype(np.float32)
    for shape in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
)

MODES = {"disable_jit": jax.disable_jit, "debug_nans": jax.debug_nans, "debug_infs": jax.debug_infs}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def loss(q: Any, k: Any, v: Any, **options: Any) -> jax.Array:
    return (dot_product_attention(q, k, v, is_causal=True, **options) ** 2).sum()


@modes
@pytest.mark.parametrize("is_jitted", [False, True])
def test_values_and_derivatives_under_debug_modes(mode: Any, is_jitted: bool):
    programs: list[Any] = [
        loss,
        jax.value_and_grad(loss, (0, 1, 2)),
        jax.vmap(loss, (0, 0, 0)),
        lambda *x: loss(*x, dropout_rate=0.5, dropout_key=jax.random.key(0)),
    ]
    if mode is not jax.debug_infs or is_jitted:
        # Outside jit the derivative's operations run one by one, and masked scores are -inf.
        programs.append(lambda *x: jax.jvp(jax.grad(loss), x, x))
    for program in programs:
        expected = program(Q, K, V)
        with mode(True):
            got = (jax.jit(program) if is_jitted else program)(Q, K, V)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", [loss, jax.grad(loss), jax.jit(jax.grad(loss))])
def test_debug_nans_finds_nan_in_the_query(program: Any):
    q = Q.copy()
    q[0, 3, 1] = np.nan
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        program(q, K, V)


def test_debug_nans_accepts_nan_in_padding():
    k = K.copy()
    k[0, 4:] = np.nan
    lengths = np.array([4, 6])
    with jax.debug_nans(True):
        # JAX checks results only, not this argument with NaN in its padding.
        got = jax.jit(jax.grad(loss))(Q, k, K, key_value_seq_lengths=lengths)
    np.testing.assert_array_equal(got, jax.grad(loss)(Q, K, K, key_value_seq_lengths=lengths))


def test_debug_infs_finds_the_lse_of_a_row_without_keys():
    lengths = np.array([4, 5])
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        jax.grad(loss)(Q, K, V, query_seq_lengths=lengths)


# Strict promotion: arrays of two dtypes are never mixed implicitly.

ROWS = np.array([3, 5])
IDS = {
    "query_segment_ids": np.array([[1, 1, 2, 2, 0]] * 2, np.int16),
    "key_value_segment_ids": np.array([[1, 1, 1, 2, 2, 0]] * 2, np.uint8),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "lengths": {
        "query_seq_lengths": ROWS,
        "key_value_seq_lengths": ROWS.astype(np.uint8),
        "causal_alignment": "bottom_right",
    },
    "window, cap": {"local_window_size": 2, "logits_soft_cap": 3.0},
    "bias, mask": {"bias": np.ones((5, 6), np.float16), "mask": np.ones((5, 6), bool)},
    "float32 bias": {"bias": np.ones((5, 6), np.float32)},
    "alibi": {"alibi_slopes": np.ones(4, np.float32)},
    "sinks": {"sinks": np.ones((2, 4), np.float16)},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)},
    "ids": {**IDS, "causal_alignment": "bottom_right"},
    "ids, max_segments": {**IDS, "max_segments": 2, "alibi_slopes": np.ones(4, np.float16)},
    "scale": {"scale": np.ones(4, np.float16)},
    "all results": {"return_lse": True, "return_max_logits": True, "return_residual": True},
}
PLATFORMS = {"cpu": (), "cuda": ("sm90",), "rocm": ("gfx942",)}


def total(call: Any, arrays: tuple[Any, ...]) -> jax.Array:
    results = jax.tree.leaves(call(*arrays))
    return jnp.stack([x.sum().astype(jnp.float32) for x in results]).sum()


@pytest.mark.parametrize(
    ("platform", "is_x64", "dtypes"),
    [
        ("cpu", False, ("bfloat16", "float16", "float32")),
        ("cpu", True, ("bfloat16", "float64")),
        ("cuda", True, ("bfloat16",)),
        ("rocm", True, ("bfloat16",)),
    ],
)
@pytest.mark.filterwarnings("ignore:attention.* falls? back")
def test_gradients_under_strict_promotion(platform: str, is_x64: bool, dtypes: tuple[str, ...]):
    def lower(call: Any, arrays: tuple[Any, ...]) -> None:
        traced = jax.jit(jax.grad(total, 1), static_argnums=0).trace(call, arrays)
        traced.lower(lowering_platforms=(platform,))

    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(is_x64))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        if PLATFORMS[platform]:
            stack.enter_context(target(*PLATFORMS[platform]))
        for dtype in dtypes:
            arrays = tuple(jnp.asarray(x, dtype) for x in (Q, K, V))
            for options in OPTIONS.values():
                lower(lambda *x, o=options: dot_product_attention(*x, is_causal=True, **o), arrays)

            def ragged(q, k, v):
                cu = np.array([0, 2, 5])
                return ragged_dot_product_attention(
                    q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=3, max_seqlen_kv=3
                )

            lower(ragged, tuple(x[0] for x in arrays))


def test_forward_over_reverse_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        for options in OPTIONS.values():
            arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V))
            call = lambda *x, o=options: dot_product_attention(*x, is_causal=True, **o)  # noqa: E731

            def gradient(arrays, call=call):
                return jax.grad(total, 1)(call, arrays)

            jax.jit(lambda x, g=gradient: jax.jvp(g, (x,), (x,))).lower(arrays)
