"""Traced windows and lengths: under jit, scan and vmap, and the kernels that run them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, dropout_mask, explain, rewrites
from attn_dispatch.core.verdict import Verdict
from attn_dispatch.reason import rules_of
from tests.support.backend import needs_cudnn

X = np.random.default_rng(0).standard_normal((2, 9, 2, 8)).astype(np.float32)
WINDOWS = np.array([0, 2, 5, 2**31 - 1], np.int32)


def attend(x: Any, window: Any, **more: Any) -> jax.Array:
    return dot_product_attention(x, x, x, local_window_size=window, **more)


def static_result(window: Any, **more: Any) -> np.ndarray:
    return np.asarray(attend(X, window, **more))


SIDES = {
    "both": lambda w: w,
    "left": lambda w: (w, None),
    "left and a static right": lambda w: (w, 1),
    "right": lambda w: (None, w),
    "right and a static left of 0": lambda w: (0, w),
}


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("side", SIDES)
def test_traced_window_gives_the_results_of_a_static_one(side: str, alignment: Any):
    pair, traced = SIDES[side], []

    @jax.jit
    def call(w: Any) -> jax.Array:
        traced.append(w)
        return attend(X, pair(w), causal_alignment=alignment)

    for window in WINDOWS.tolist():
        expected = static_result(pair(window), causal_alignment=alignment)
        np.testing.assert_allclose(call(window), expected, atol=1e-6)
    assert np.isnan(call(-1)).all()
    assert len(traced) == 1  # one program for every window


def test_windows_of_layers_in_a_scan():
    def layer(x, window):
        x = x + attend(x, (window, 0), is_causal=True)
        return x, x.sum()

    def loss(x, windows):
        return jax.lax.scan(layer, x, windows)[1].sum()

    def looped(x):
        total = 0.0
        for window in WINDOWS.tolist():
            x = x + attend(x, (window, 0), is_causal=True)
            total = total + x.sum()
        return total

    got = jax.jit(jax.value_and_grad(loss))(X, jnp.asarray(WINDOWS))
    for x, y in zip(got, jax.value_and_grad(looped)(X), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def test_lengths_of_the_layers_in_a_scan():
    lengths = np.array([[9, 4], [2, 9], [0, 1]])

    def layer(x, length):
        y = dot_product_attention(x, x, x, key_value_seq_lengths=length, is_causal=True)
        return x + y, y

    _, got = jax.jit(lambda x: jax.lax.scan(layer, x, lengths))(X)
    x = jnp.asarray(X)
    for layer_out, length in zip(got, lengths, strict=True):
        x, expected = layer(x, length)
        np.testing.assert_allclose(layer_out, expected, rtol=1e-5, atol=1e-5)


def test_each_mapped_call_has_its_own_window():
    calls = np.stack([X, 2 * X, X - 1, X])
    call = jax.vmap(lambda x, w: attend(x, (w, 1)), (0, 0))
    for run in (call, jax.jit(call)):
        got = run(calls, jnp.array([0, 3, -1, 9]))
        for i, window in ((0, 0), (1, 3), (3, 9)):
            np.testing.assert_allclose(got[i], attend(calls[i], (window, 1)), atol=1e-6)
        assert np.isnan(got[2]).all()
    one_array = jax.vmap(lambda w: attend(X, w))(jnp.array([1, 4]))
    np.testing.assert_allclose(one_array[1], static_result(4), atol=1e-6)


def test_traced_window_with_other_options():
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0]] * 2)
    more: dict[str, Any] = {
        "query_segment_ids": ids, "alibi_slopes": np.array([0.5, 0.1], np.float32),
        "dropout_rate": 0.3, "dropout_key": jax.random.key(0), "causal_alignment": "bottom_right",
    }  # fmt: skip
    got = jax.jit(lambda w: attend(X, (w, 1), **more))(2)
    np.testing.assert_allclose(got, static_result((2, 1), **more), atol=1e-6)
    keep = jax.jit(lambda w: dropout_mask(X, X, X, local_window_size=w, **more))(2)
    assert keep.shape == (2, 2, 9, 9)


def test_window_with_known_values_stays_static():
    """NumPy numbers and untraced arrays become static, so that kernels run them as windows."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    for window in (np.int64(5), np.array(5), jnp.array(5)):
        spec = explain(x, x, x, local_window_size=(window, None), target="sm90").call
        assert spec.meaning.window == (5, None) and not spec.has("window")


@pytest.mark.parametrize(
    ("target", "name"), [pytest.param("sm90", "cudnn", marks=needs_cudnn), ("gfx942", "aiter")]
)
def test_kernels_run_a_traced_window_as_a_mask_and_explain_it(target: str, name: str):
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    window = jax.ShapeDtypeStruct((), jnp.int32)

    def verdict(*, rewritten: bool) -> Verdict:
        explanations: list[Any] = []

        def call(x, window):
            explanations.append(explain(x, x, x, local_window_size=(window, None), target=target))

        with rewrites(rewritten):
            jax.eval_shape(call, x, window)
        (found,) = (v for v in explanations[0].forward if v.implementation == name)
        return found

    refused, runs = verdict(rewritten=False), verdict(rewritten=True)
    for reasons in (refused.reasons, runs.reasons_as_it_is):
        assert "feature/local_window_size as an array" in rules_of(reasons)
    assert runs.is_eligible and "causality and window: as a mask" in runs.rewrites


def test_switch_over_static_windows_as_in_the_docs():
    windows = (1, 4, None)

    def layer(x, kind):
        calls = [lambda x, w=w: attend(x, None if w is None else (w, 0)) for w in windows]
        return jax.lax.switch(kind, calls, x), None

    kinds = jnp.array([0, 2, 1])
    got, _ = jax.jit(lambda x: jax.lax.scan(layer, x, kinds))(X)
    expected = jnp.asarray(X)
    for kind in (0, 2, 1):
        expected, _ = layer(expected, kind)
    np.testing.assert_allclose(got, expected, atol=1e-6)
