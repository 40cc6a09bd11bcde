"""`attention`: an `attention_fn` with options that no layer overrides."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Unpack  # noqa: TID251  # the arguments that a layer passes

import jax
from jax.typing import ArrayLike, DTypeLike

from attn_dispatch.api import dot_product_attention
from attn_dispatch.call.foreign_names import check_names
from attn_dispatch.integrations.flax.function import (
    Attention,
    Options,
    attention_fn,
    check_options,
)
from attn_dispatch.integrations.layers import (
    check_no_conflict,
    check_not_given,
    check_static_values,
)

_FLAX = ("broadcast_dropout", "dtype")


class FlaxOptions(Options, total=False):
    """What a user may set for all calls of a layer."""

    bias: ArrayLike | None
    mask: ArrayLike | None
    is_causal: bool
    broadcast_dropout: bool
    dtype: DTypeLike | None


def attention(**options: Unpack[FlaxOptions]) -> Attention:
    """An `attention_fn` with options that no layer overrides.

        nnx.MultiHeadAttention(..., attention_fn=attention(is_causal=True))

    A layer passes some arguments in every call, with Flax's defaults where nobody set them: NNX's
    passes is_causal=False. An argument that it passes with the default is left to the options.

    Args:
      options: arguments of `attn_dispatch.dot_product_attention`, or Flax's broadcast_dropout and
        dtype. Dropout itself is the layer's.

    Returns:
      A function for `attention_fn=`. It raises a ValueError where the layer passes something else
      than an option and its default, for example a mask where the options have one.

    Raises:
      TypeError: there is no such argument.
      ValueError: options have a query, key or value, which the layer passes; or they ask for
        dropout, for further results, or for another order of axes; or a window, soft cap or bool
        is wrong.
    """
    check_names(dot_product_attention, {x: y for x, y in options.items() if x not in _FLAX})
    if "dropout_rate" in options:
        raise ValueError("dropout_rate: expected it in the layer, got it in attention(…)")
    check_not_given(options, ("query", "key", "value"), "attention")
    check_options(options)
    check_static_values(options)
    parameters = inspect.signature(attention_fn).parameters
    names, defaults = list(parameters), {name: x.default for name, x in parameters.items()}

    @functools.wraps(attention_fn)
    def merged(*args: Any, **passed: Any) -> jax.Array:
        given = dict(zip(names, args, strict=False)) | passed
        check_no_conflict(options, given, defaults, "attention")
        return attention_fn(**given | dict[str, Any](options))

    return merged
