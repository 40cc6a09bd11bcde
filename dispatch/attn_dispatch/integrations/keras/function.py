"""`keras.ops.dot_product_attention`, computed by attn_dispatch."""

from __future__ import annotations

import functools
from typing import Unpack, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike
from keras.src import backend

from attn_dispatch.api import dot_product_attention as attend
from attn_dispatch.call.keywords import SharedArguments
from attn_dispatch.call.static_arguments import Implementations, OwnName, Window
from attn_dispatch.core import select
from attn_dispatch.integrations.layers import as_bool, check_layout
from attn_dispatch.integrations.patching import Tally
from attn_dispatch.programs.functions import ScoreMod
from attn_dispatch.warning import skip_frames_of

skip_frames_of(keras.__file__)

TALLY = Tally("patch_keras", "Keras's attention")


class _Options(SharedArguments[ArrayLike], total=False):
    local_window_size: Window
    dropout_rate: float
    dropout_key: ArrayLike | None


@TALLY.counted
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
    options["qkv_layout"] = "BTNH"
    options.setdefault("causal_alignment", "top_left")  # as Keras documents it
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


def _implementation(flash_attention: bool | None) -> Implementations:
    if flash_attention is None:
        return None
    return tuple(OwnName(x) for x in select.names() if x != "xla") if flash_attention else "xla"


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
