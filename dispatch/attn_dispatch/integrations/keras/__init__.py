"""Keras 3 on JAX: a patch by which attn_dispatch computes its attention.

    with patch_keras():
        model.fit(...)
    patch_keras().start()  # for good

It covers `keras.ops.dot_product_attention` and the layers MultiHeadAttention and
GroupQueryAttention, also with dropout, which Keras itself computes in separate operations; and the
layers of KerasHub's GPT-OSS, Gemma, Gemma 2 and Gemma 3.
"""

from __future__ import annotations

import keras
from keras.src import backend

from attn_dispatch.integrations.keras import hub, layers
from attn_dispatch.integrations.keras.function import TALLY, dot_product_attention
from attn_dispatch.integrations.patching import Patch

__all__ = ["dot_product_attention", "patch_keras"]


def patch_keras(*, may_be_unused: bool = False) -> Patch:
    """Replace Keras's attention by attn_dispatch's, without changes to the model.

    flash_attention=True asks for a vendor's kernel, or an error with every reason; False asks for
    XLA; None, the default, takes the best. attn_logits_soft_cap is x / (1 + |x| / cap), as Keras
    documents it. Layers that return their scores or attend along several axes run Keras's own code,
    and so does MultiHeadAttention without dropout, which then calls
    `keras.ops.dot_product_attention`. Keys and values of GroupQueryAttention are not repeated.
    Dropout draws a different mask than Keras with the same seed.

    Functions compiled before the patch are not affected, nor are subclasses of the layers that
    define `_compute_attention`. The patch applies to the whole process, other threads included. If
    nothing went through it, a warning at its end says so, and what ran instead.

    The attention of KerasHub's GPT-OSS, Gemma, Gemma 2 and Gemma 3 goes through it too, with sinks,
    soft cap and window, if keras_hub was imported before.

    Args:
      may_be_unused: whether not to warn.

    Returns:
      A `Patch`, which has not been started.

    Raises:
      ValueError: Keras runs on another backend than JAX.
    """
    if keras.backend.backend() != "jax":
        raise ValueError(f"patch_keras: expected Keras on jax, got {keras.backend.backend()}")
    function = {(backend.nn, "dot_product_attention"): dot_product_attention}
    replaced = function | layers.replacements() | hub.replacements()
    return Patch(replaced, TALLY, may_be_unused=may_be_unused)
