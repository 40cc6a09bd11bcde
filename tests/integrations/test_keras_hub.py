"""KerasHub's attention by einsum with our patch, on layers with the arguments of KerasHub 0.32.

keras_hub itself needs TensorFlow, and is not installed here. The layers below have its names.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
pytest.importorskip("keras")

import keras

from attn_dispatch.integrations.keras import patch_keras

if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend here", allow_module_level=True)

B, T, S, N, K, H = 2, 4, 7, 4, 2, 8
_rng = np.random.default_rng(5)
Q, KEYS, V = (jnp.asarray(_rng.standard_normal((B, n, heads, H)), jnp.float32)
              for n, heads in ((T, N), (S, K), (S, K)))  # fmt: skip


def attend(q: Any, k: Any, v: Any, mask: Any, scale: float, cap: Any = None, sinks: Any = None):
    """Attention [B, T, N, H] by einsum; mask [B, T, S], True = attend."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if mask is not None:
        scores = jnp.where(mask[:, None], scores, -1e9)
    if sinks is not None:
        row = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, row], axis=-1)
    weights = jax.nn.softmax(scores)[..., : k.shape[1]]
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


class Gemma(keras.layers.Layer):
    """As CachedGemmaAttention, with a soft cap and a window of 3 keys."""

    head_dim, hidden_dim, num_query_heads = H, 48, N
    query_head_dim_normalize, logit_soft_cap, dropout = False, 0.5, 0.0
    use_sliding_window_attention = True

    def _mask_sliding_window(self, attention_mask: Any, cache_update_index: Any = 0) -> Any:
        t, s = attention_mask.shape[1:]
        distance = jnp.arange(t)[:, None] + cache_update_index - jnp.arange(s)
        return attention_mask & (abs(distance) < 3)

    def _compute_attention(
        self, q: Any, k: Any, v: Any, attention_mask: Any, training: bool = False,
        cache_update_index: Any = 0,
    ) -> Any:  # fmt: skip
        mask = self._mask_sliding_window(attention_mask, cache_update_index)
        return attend(q, k, v, mask, (48 // N) ** -0.5, cap=self.logit_soft_cap)


class GptOss(keras.layers.Layer):
    """As GptOssAttention, with 2 keys before a query in its window."""

    num_key_value_groups, sliding_window, _inv_norm_factor = N // K, 2, 0.3

    def __init__(self) -> None:
        super().__init__()
        self.sinks = self.add_weight(shape=(N,), initializer="random_normal")

    def _compute_attention(
        self, query: Any, key: Any, value: Any, attention_mask: Any = None, start_index: Any = 0
    ) -> Any:
        t, s = query.shape[1], key.shape[1]
        mask = jnp.arange(s) >= jnp.arange(t)[:, None] + start_index - self.sliding_window
        mask = mask[None] if attention_mask is None else mask & attention_mask
        sinks = self.sinks.value
        return attend(query, key, value, mask, self._inv_norm_factor, sinks=sinks)


class Older(GptOss):
    def _compute_attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Any, key: Any, value: Any, attention_mask: Any = None
    ) -> Any:
        return query


@pytest.fixture(autouse=True)
def keras_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, layers in {
        "gemma.gemma_attention": {"CachedGemmaAttention": Gemma},
        "gpt_oss.gpt_oss_attention": {"GptOssAttention": GptOss},
        "gemma3.gemma3_attention": {"CachedGemma3Attention": Older},
    }.items():
        made = types.ModuleType(module)
        vars(made).update(layers)
        monkeypatch.setitem(sys.modules, f"keras_hub.src.models.{module}", made)


@pytest.mark.parametrize("start", [0, 3])
def test_gemma_goes_through_with_its_soft_cap_and_window(start: int):
    layer, mask = Gemma(), np.tri(T, S, k=start, dtype=bool)[None].repeat(B, 0)
    arguments = (Q, KEYS, V, mask)
    expected = layer._compute_attention(*arguments, cache_update_index=start)
    with patch_keras():
        got = layer._compute_attention(*arguments, cache_update_index=start)
        traced = jax.make_jaxpr(lambda q: layer._compute_attention(q, *arguments[1:]))(Q)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert "attn_fwd[" in str(traced)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("has_mask", [True, False])
def test_gpt_oss_goes_through_with_sinks_and_window(start: int, has_mask: bool):
    layer, mask = GptOss(), np.tri(T, S, k=start, dtype=bool)[None].repeat(B, 0)
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (KEYS, V))
    arguments = (Q, k, v, mask if has_mask else None, start)
    expected = layer._compute_attention(*arguments)
    with patch_keras():
        got = layer._compute_attention(*arguments)
        traced = jax.make_jaxpr(lambda q: layer._compute_attention(q, *arguments[1:]))(Q)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert "attn_fwd[" in str(traced)
    assert f"f32[{B},{S},{K},{H}]" in str(traced)  # keys and values are not repeated


def test_layers_with_other_arguments_stay_as_they_are():
    with patch_keras(may_be_unused=True):
        assert Older()._compute_attention(Q, KEYS, V) is Q
