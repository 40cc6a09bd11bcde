"""Keras 3 on JAX: a patch by which attn_dispatch computes its attention.

    with patch_keras():
        model.fit(...)
    patch_keras().start()  # for good

It covers `keras.ops.dot_product_attention` and the layers MultiHeadAttention and
GroupQueryAttention, also with dropout, which Keras itself computes in separate operations.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias, Unpack, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike
from keras.src import backend
from keras.src.layers.attention.grouped_query_attention import GroupedQueryAttention
from keras.src.layers.attention.multi_head_attention import MultiHeadAttention
from keras.src.random.seed_generator import draw_seed  # pyright: ignore[reportUnknownVariableType]

from attn_dispatch.api import dot_product_attention as attend
from attn_dispatch.call.dense_masks import without_dense_mask_warnings
from attn_dispatch.call.keywords import SharedArguments
from attn_dispatch.call.static_arguments import Window
from attn_dispatch.core import select
from attn_dispatch.integrations.masks import as_bool
from attn_dispatch.integrations.options import check_layout
from attn_dispatch.integrations.patching import Patch, original
from attn_dispatch.programs.functions import ScoreMod
from attn_dispatch.warning import skip_frames_of

skip_frames_of(keras.__file__)

_COMPUTE = "_compute_attention"

_Layer: TypeAlias = Any
"""MultiHeadAttention or GroupedQueryAttention: all that is read of them is private."""


class _Options(SharedArguments[ArrayLike], total=False):
    local_window_size: Window
    dropout_rate: float
    dropout_key: ArrayLike | None


def patch_keras() -> Patch:
    """Replace Keras's attention by attn_dispatch's, without changes to the model.

    flash_attention=True asks for a vendor's kernel, or an error with every reason; False asks for
    XLA; None, the default, takes the best. attn_logits_soft_cap is x / (1 + |x| / cap), as Keras
    documents it. Layers that return their scores or attend along several axes run Keras's own code,
    and so does MultiHeadAttention without dropout, which then calls
    `keras.ops.dot_product_attention`. Keys and values of GroupQueryAttention are not repeated.
    Dropout draws a different mask than Keras with the same seed.

    Functions compiled before the patch are not affected, nor are subclasses of the layers that
    define `_compute_attention`. The patch applies to the whole process, other threads included.

    Returns:
      A `Patch`, which has not been started.

    Raises:
      ValueError: Keras runs on another backend than JAX.
    """
    if keras.backend.backend() != "jax":
        raise ValueError(f"patch_keras: expected Keras on jax, got {keras.backend.backend()}")
    return Patch(
        {
            (backend.nn, "dot_product_attention"): dot_product_attention,
            (MultiHeadAttention, _COMPUTE): _multi_head,
            (GroupedQueryAttention, _COMPUTE): _grouped_query,
        }
    )


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
    **options: Unpack[_Options],
) -> jax.Array:
    """`keras.ops.dot_product_attention`, computed by attn_dispatch.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, V]; the three are promoted as in Keras.
      bias: broadcastable to [B, N, T, S].
      mask: the same, bool or numbers; else [B, T, S], [B, N, S] or [B, S].
      scale: as for `attn_dispatch.dot_product_attention`.
      is_causal: the same.
      flash_attention: see `patch_keras`.
      attn_logits_soft_cap: c > 0; scores become score / (1 + |score| / c).
      options: further arguments of `attn_dispatch.dot_product_attention`.

    Returns:
      [B, T, N, V] in the promoted dtype.

    Raises:
      ValueError: the call is wrong.
      NotImplementedError: flash_attention=True, and no kernel runs the call.
    """
    check_layout(options)
    arrays = [_tensor(x) for x in (query, key, value)]
    if any(x.ndim != 4 for x in arrays):
        raise ValueError(
            "dot_product_attention: expected query, key and value with 4 dims, got "
            f"{[list(x.shape) for x in arrays]}"
        )
    dtype = backend.result_type(*(x.dtype for x in arrays))
    query, key, value = (cast("jax.Array", backend.cast(x, dtype)) for x in arrays)
    if bias is not None:
        bias = _tensor(bias, dtype)
    if mask is not None:
        full = (*query.shape[:1], query.shape[2], query.shape[1], key.shape[1])
        mask = _with_heads(as_bool(_tensor(mask)), full)
    if attn_logits_soft_cap is not None:
        options["score_mod"] = _soft_cap(float(attn_logits_soft_cap))
    out: jax.Array = attend(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        implementation=_implementation(flash_attention),
        **options,
    )
    return out


def _tensor(x: ArrayLike, dtype: str | None = None) -> jax.Array:
    return cast("jax.Array", backend.convert_to_tensor(x, dtype=dtype))


def _multi_head(
    layer: _Layer,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    **causal: bool,
) -> tuple[jax.Array, jax.Array | None]:
    if not layer._dropout or return_attention_scores or query.ndim != 4:
        theirs = original(MultiHeadAttention, _COMPUTE)
        with without_dense_mask_warnings():
            return theirs(
                layer, query, key, value, attention_mask, training, return_attention_scores,
                **causal,
            )  # fmt: skip
    arrays = (query, key, value)
    return _attended(layer, arrays, attention_mask, training, layer._inverse_sqrt_key_dim, **causal)


def _grouped_query(
    layer: _Layer,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    training: bool | None = None,
    **causal: bool,
) -> tuple[jax.Array, jax.Array | None]:
    if layer._return_attention_scores or query.ndim != 4:
        theirs = original(GroupedQueryAttention, _COMPUTE)
        return theirs(
            layer, query, key, value, attention_mask=attention_mask, training=training, **causal
        )
    if type(layer).call is GroupedQueryAttention.call:
        key, value = (_unrepeated(x, layer.num_repeats) for x in (key, value))
    arrays = (query, key, value)
    scale = layer._inverse_sqrt_head_dim
    return _attended(layer, arrays, attention_mask, training, scale, **causal)


def _unrepeated(x: jax.Array, times: int) -> jax.Array:
    """x [B, S, K · times, H], whose heads Keras has repeated, as [B, S, K, H]. XLA removes both."""
    batch, length, heads, size = x.shape
    return x.reshape(batch, length, heads // times, times, size)[:, :, :, 0]


def _attended(
    layer: _Layer,
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
            dropout_key=_key(layer._dropout_layer.seed_generator) if rate else None,
        )
    return out, None


def _key(seed_generator: object) -> jax.Array:
    """The generator's next seed, which is a raw key, as an array."""
    return jnp.asarray(draw_seed(seed_generator))


def _implementation(flash_attention: bool | None) -> str | tuple[str, ...] | None:
    if flash_attention is None:
        return None
    return tuple(x for x in select.names() if x != "xla") if flash_attention else "xla"


@functools.cache
def _soft_cap(cap: float) -> ScoreMod:
    def capped(score: jax.Array, *_: jax.Array) -> jax.Array:
        return score / (1 + jnp.abs(score) / cap)

    return capped


def _with_heads(mask: jax.Array, full: tuple[int, ...]) -> jax.Array:
    """The mask, with missing axes inserted if it does not broadcast to [B, N, T, S] as it is."""
    if mask.ndim in (2, 3) and not _broadcasts(mask.shape, full):
        if mask.ndim == 3 and mask.shape[1] == full[1]:
            return mask[:, :, None]
        return mask.reshape(mask.shape[0], *(1,) * (4 - mask.ndim), *mask.shape[1:])
    return mask


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, full) == full
    except ValueError:
        return False
