"""The attention of Keras's layers, with their dropout, computed by attn_dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias  # noqa: TID251  # Keras's layers, by private attributes

import jax
import jax.numpy as jnp
from keras.src.layers.attention.grouped_query_attention import GroupedQueryAttention
from keras.src.layers.attention.multi_head_attention import MultiHeadAttention
from keras.src.random.seed_generator import draw_seed  # pyright: ignore[reportUnknownVariableType]

from attn_dispatch.call.dense_masks import without_dense_mask_warnings
from attn_dispatch.integrations.keras.function import dot_product_attention
from attn_dispatch.integrations.patching import Place, original

COMPUTE = "_compute_attention"

Layer: TypeAlias = Any
"""A layer of Keras or KerasHub: all that is read of it is private."""


def replacements() -> dict[Place, Callable[..., object]]:
    """Our functions, by the methods of Keras's layers that they replace."""
    return {
        (MultiHeadAttention, COMPUTE): _multi_head,
        (GroupedQueryAttention, COMPUTE): _grouped_query,
    }


def _multi_head(
    layer: Layer,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    **causal: bool,
) -> tuple[jax.Array, jax.Array | None]:
    if not layer._dropout or return_attention_scores or query.ndim != 4:
        theirs = original(MultiHeadAttention, COMPUTE)
        with without_dense_mask_warnings():
            return theirs(
                layer, query, key, value, attention_mask, training, return_attention_scores,
                **causal,
            )  # fmt: skip
    arrays = (query, key, value)
    return _attended(layer, arrays, attention_mask, training, layer._inverse_sqrt_key_dim, **causal)


def _grouped_query(
    layer: Layer,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    training: bool | None = None,
    **causal: bool,
) -> tuple[jax.Array, jax.Array | None]:
    if layer._return_attention_scores or query.ndim != 4:
        theirs = original(GroupedQueryAttention, COMPUTE)
        return theirs(
            layer, query, key, value, attention_mask=attention_mask, training=training, **causal
        )
    if type(layer).call is GroupedQueryAttention.call:
        key, value = (unrepeated(x, layer.num_repeats) for x in (key, value))
    arrays = (query, key, value)
    scale = layer._inverse_sqrt_head_dim
    return _attended(layer, arrays, attention_mask, training, scale, **causal)


def unrepeated(x: jax.Array, times: int) -> jax.Array:
    """x [B, S, K · times, H], whose heads Keras has repeated, as [B, S, K, H]. XLA removes both."""
    batch, length, heads, size = x.shape
    return x.reshape(batch, length, heads // times, times, size)[:, :, :, 0]


def _attended(
    layer: Layer,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array | None,
    training: bool | None,
    scale: float,
    use_causal_mask: bool = False,
) -> tuple[jax.Array, None]:
    """A layer's attention with its dropout, and None in place of scores."""
    rate = layer._dropout_layer.rate if training else 0.0
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]  # [B, T, S]
    with without_dense_mask_warnings():
        out = dot_product_attention(
            *arrays,
            mask=mask,
            scale=scale,
            is_causal=use_causal_mask,
            flash_attention=layer._flash_attention,
            dropout_rate=rate,
            dropout_key=dropout_key(layer._dropout_layer.seed_generator) if rate else None,
        )
    return out, None


def dropout_key(seed_generator: object) -> jax.Array:
    """The generator's next seed, which is a raw key, as an array."""
    return jnp.asarray(draw_seed(seed_generator))
