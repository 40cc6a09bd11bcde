"""The attention of KerasHub's layers that compute it by einsum, computed by attn_dispatch.

Their arguments are those of KerasHub 0.32. Layers with other arguments run KerasHub's own code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attn_dispatch.call.dense_masks import without_dense_mask_warnings
from attn_dispatch.integrations.keras.function import dot_product_attention
from attn_dispatch.integrations.keras.layers import COMPUTE, Layer, dropout_key, unrepeated
from attn_dispatch.integrations.layers import as_bool
from attn_dispatch.integrations.patching import Place


def replacements() -> dict[Place, Callable[..., object]]:
    """Our functions, by the methods of the imported layers of KerasHub that they replace."""
    found: dict[Place, Callable[..., object]] = {}
    for module, name, function in _LAYERS:
        layer = getattr(sys.modules.get(f"keras_hub.src.models.{module}"), name, None)
        if layer is not None and _arguments(getattr(layer, COMPUTE)) == _arguments(function):
            found[layer, COMPUTE] = function
    return found


def _arguments(function: Callable[..., object]) -> list[str]:
    """The names of the arguments after the layer."""
    return list(inspect.signature(function).parameters)[1:]


def _gemma(
    layer: Layer,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attention_mask: jax.Array | None,
    training: bool = False,
    cache_update_index: int | jax.Array = 0,
) -> jax.Array:
    """Gemma to Gemma 3: a soft cap, and a window that the layer writes into its mask."""
    if layer.use_sliding_window_attention and attention_mask is not None:
        attention_mask = layer._mask_sliding_window(
            attention_mask, cache_update_index=cache_update_index
        )
    size = layer.head_dim
    if not layer.query_head_dim_normalize:
        size = layer.hidden_dim // layer.num_query_heads
    rate = layer.dropout if training else 0.0
    with without_dense_mask_warnings():
        return dot_product_attention(
            q,
            k,
            v,
            mask=None if attention_mask is None else attention_mask[:, None],
            scale=size**-0.5,
            logits_soft_cap=layer.logit_soft_cap,
            dropout_rate=rate,
            dropout_key=dropout_key(layer.dropout_layer.seed_generator) if rate else None,
        )


def _gpt_oss(
    layer: Layer,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    start_index: int | jax.Array = 0,
) -> jax.Array:
    """GPT-OSS: sinks, and a window of each query's own key and sliding_window keys before it."""
    key, value = (unrepeated(x, layer.num_key_value_groups) for x in (key, value))
    mask = None if attention_mask is None else as_bool(attention_mask)[:, None]
    window = None
    if layer.sliding_window:
        if isinstance(start_index, int) and start_index == 0:
            window = (layer.sliding_window, None)
        else:
            queries = jnp.arange(query.shape[1])[:, None] + start_index
            is_near = jnp.arange(key.shape[1]) >= queries - layer.sliding_window
            mask = is_near[None, None] if mask is None else mask & is_near
    with without_dense_mask_warnings():
        return dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=layer._inv_norm_factor,
            sinks=layer.sinks.value,
            local_window_size=window,
        )


_LAYERS: tuple[tuple[str, str, Callable[..., object]], ...] = (
    ("gemma.gemma_attention", "CachedGemmaAttention", _gemma),
    ("gemma3.gemma3_attention", "CachedGemma3Attention", _gemma),
    ("gpt_oss.gpt_oss_attention", "GptOssAttention", _gpt_oss),
)
"""The module below keras_hub.src.models, the layer in it, and the function for its attention."""
