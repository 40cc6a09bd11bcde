"""Keras's function and layers with our patch: masks, dtypes, soft cap, dropout, scores."""

from __future__ import annotations

import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
pytest.importorskip("keras")

import keras
from keras.src import backend

import attn_dispatch
from attn_dispatch import AttentionConventionWarning
from attn_dispatch.integrations.keras import dot_product_attention, patch_keras

B, T, S, N, H = 2, 5, 7, 4, 8
_rng = np.random.default_rng(3)
Q, K, V = (_rng.standard_normal((B, x, N, H)).astype(np.float32) for x in (T, S, S))
PAIRS = (_rng.random((B, N, T, S)) < 0.6) | (np.arange(S) == 0)

if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend here", allow_module_level=True)


@pytest.fixture(autouse=True)
def same_weights():
    """Set a seed, without which Keras draws other weights in every run."""
    keras.utils.set_random_seed(0)


def both(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    theirs = keras.ops.dot_product_attention(*arguments, **options)
    with patch_keras():
        return keras.ops.dot_product_attention(*arguments, **options), theirs


@pytest.mark.parametrize(
    "mask",
    [PAIRS, PAIRS.astype("int32"), PAIRS.astype("float32"), PAIRS[:, :1], PAIRS[:, 0],
     PAIRS[:, :, 0], PAIRS[:, 0, 0], PAIRS[0, 0]],
    ids=["pairs", "ints", "floats", "heads_alike", "BTS", "BNS", "BS", "TS"],
)  # fmt: skip
def test_masks_agree_with_keras(mask: np.ndarray):
    try:
        expected = keras.ops.dot_product_attention(Q, K, V, mask=mask)
    except ValueError as refused:  # Keras 3.12 refuses masks of fewer dims
        if mask.ndim == 4:
            raise
        pytest.skip(f"Keras {keras.__version__}: {refused}")
    with patch_keras():
        got = keras.ops.dot_product_attention(Q, K, V, mask=mask)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_options_and_dtypes_agree_with_keras():
    bias = _rng.standard_normal((1, N, T, S))
    q, k = jnp.asarray(Q, jnp.bfloat16), jnp.asarray(K, jnp.bfloat16)
    options: dict[str, Any] = {"scale": 0.2, "is_causal": True}
    for arrays in ((Q, K, V), (q, k, V), (Q, K[:, :, :2], V[:, :, :2])):
        got, expected = both(*arrays, bias=bias, **options)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, atol=2e-6)
    with patch_keras(), pytest.raises(ValueError, match="4 dims"):
        keras.ops.dot_product_attention(Q[0], K[0], V[0])


def test_another_order_of_axes_is_refused():
    with pytest.raises(ValueError, match="qkv_layout: expected 'BTNH'"):
        dot_product_attention(Q, K, V, qkv_layout="BNTH")


def test_flash_attention_chooses_a_kernel_or_gives_every_reason():
    """With flash_attention=True XLA is never chosen."""
    with pytest.raises(NotImplementedError, match="cudnn"):
        jax.block_until_ready(dot_product_attention(Q, K, V, flash_attention=True))
    jaxpr = str(
        jax.make_jaxpr(lambda *x: dot_product_attention(*x, flash_attention=False))(Q, K, V)
    )
    assert "implementation=('xla',)" in jaxpr


def test_the_soft_cap_is_the_one_that_keras_documents():
    cap = 0.7
    got = dot_product_attention(Q, K, V, attn_logits_soft_cap=cap)
    scores = np.einsum("btnh,bsnh->bnts", Q, K) / np.sqrt(H)
    weights = jax.nn.softmax(scores / (1 + abs(scores) / cap))
    np.testing.assert_allclose(got, np.einsum("bnts,bsnh->btnh", weights, V), atol=2e-6)


def test_a_block_in_which_keras_computes_all_attention_warns():
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    layer = keras.layers.MultiHeadAttention(N, 4)
    with (
        pytest.warns(AttentionConventionWarning, match="patch_keras: nothing called"),
        patch_keras(),
    ):
        layer(x, x, return_attention_scores=True)


def test_keras_computes_returned_scores_and_other_attention_axes(record_property: Any):
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    layer = keras.layers.MultiHeadAttention(N, 4, dropout=0.3)
    expected = layer(x, x, return_attention_scores=True, use_causal_mask=True)
    with patch_keras(may_be_unused=True):
        got = layer(x, x, return_attention_scores=True, use_causal_mask=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    image = _rng.standard_normal((B, 3, 4, 16)).astype(np.float32)
    layer = keras.layers.MultiHeadAttention(N, 4, attention_axes=(1, 2))
    expected = layer(image, image)
    with patch_keras(may_be_unused=True):
        np.testing.assert_allclose(layer(image, image), expected, atol=2e-6)
    record_property("cell", ("Keras 3", "sow", "Keras's attention computes returned scores"))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_grouped_queries_agree_with_keras(rate: float):
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    mask = _rng.random((B, T, T)) < 0.7
    mask |= np.eye(T, dtype=bool)
    layer = keras.layers.GroupQueryAttention(4, N, 2, dropout=rate)
    for options in ({}, {"use_causal_mask": True}, {"attention_mask": mask}):
        expected = layer(x, x, **options)
        with patch_keras():
            np.testing.assert_allclose(layer(x, x, **options), expected, atol=2e-6)
            dropped = layer(x, x, training=True, **options)
            assert (abs(np.asarray(dropped - expected)).max() > 0.01) == (rate > 0)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_grouped_queries_are_not_repeated(rate: float, monkeypatch: pytest.MonkeyPatch):
    heads = []

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        heads.append((query.shape[2], key.shape[2], value.shape[2]))
        return attn_dispatch.dot_product_attention(query, key, value, **options)

    monkeypatch.setattr("attn_dispatch.integrations.keras.function.attend", attend)
    layer = keras.layers.GroupQueryAttention(4, N, 2, dropout=rate)
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    with patch_keras():
        layer(x, x, use_causal_mask=True)
        layer(x, x, training=True)
        assert layer(x[:0], x[:0]).shape == (0, T, 16)
    assert heads == [(N, 2, 2)] * 3


@pytest.mark.parametrize("masks", [{}, {"use_causal_mask": True}], ids=["plain", "causal"])
def test_gradients_of_grouped_queries_agree_with_keras(masks: dict[str, bool]):
    layer = keras.layers.GroupQueryAttention(4, N, 2)
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    layer(x, x)
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights: Any) -> Any:
        return (layer.stateless_call(weights, [], x, x, **masks)[0] ** 2).sum()

    expected = jax.grad(loss)(weights)
    with patch_keras():
        got = jax.jit(jax.grad(loss))(weights)
    # The gradient of the key's bias is 0 up to rounding.
    largest = max(abs(x).max() for x in expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * largest)


def test_a_grouped_query_layer_that_overrides_call_agrees_with_keras():
    """The layer's keys may be anything, and are passed on unchanged."""

    class Overridden(keras.layers.GroupQueryAttention):
        def call(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, query: Any, value: Any, key: Any = None
        ) -> Any:
            self._return_attention_scores = False
            q, k = (self._query_dense(y) for y in (query, value))
            return self._compute_attention(q, k, k)[0]

    layer = Overridden(4, N, 2)
    x = _rng.standard_normal((B, T, 16)).astype(np.float32)
    expected = layer(x, x)
    with patch_keras():
        np.testing.assert_allclose(layer(x, x), expected, atol=2e-6)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(
    "layer", [keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention]
)
def test_masks_of_layers_do_not_warn(layer: Any, rate: float):
    """Keras makes these masks, up to 3.14 also for use_causal_mask, and users cannot avoid them."""
    arguments = (N, 4) if layer is keras.layers.MultiHeadAttention else (4, N, 2)
    x = _rng.standard_normal((1, 128, 8)).astype(np.float32)
    pairs = np.tri(128, dtype=bool)[None]
    with warnings.catch_warnings(), patch_keras():
        warnings.simplefilter("error", AttentionConventionWarning)
        layer(*arguments, dropout=rate)(x, x, attention_mask=pairs)
        q = _rng.standard_normal((1, 128, N, 4)).astype(np.float32)
        with pytest.raises(AttentionConventionWarning, match="is_causal=True"):
            keras.ops.dot_product_attention(q, q, q, mask=pairs[None])


def test_fit_agrees_with_keras_and_lowers_the_loss():
    x = _rng.standard_normal((16, T, 16)).astype(np.float32)
    y = np.roll(x, 1, axis=1)

    def losses() -> list[float]:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((T, 16))
        out = keras.layers.MultiHeadAttention(N, 4)(inputs, inputs, use_causal_mask=True)
        model = keras.Model(inputs, out)
        model.compile(optimizer="adam", loss="mse")
        return model.fit(x, y, batch_size=8, epochs=3, verbose=0).history["loss"]

    expected = losses()
    with patch_keras():
        got = losses()
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got[-1] < got[0]


def test_a_stopped_patch_restores_keras():
    before = backend.nn.dot_product_attention, keras.layers.MultiHeadAttention._compute_attention
    patch = patch_keras(may_be_unused=True).start()
    assert backend.nn.dot_product_attention is dot_product_attention
    patch.stop()
    after = backend.nn.dot_product_attention, keras.layers.MultiHeadAttention._compute_attention
    assert before == after
