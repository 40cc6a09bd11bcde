"""Flax: an `attention_fn` for NNX's and Linen's multi-head attention, and for models with them.

    nnx.MultiHeadAttention(..., attention_fn=attention_fn)
    nn.MultiHeadDotProductAttention(..., attention_fn=attention(is_causal=True))
    model = replace_attention(model, local_window_size=(4095, 0))

`attention` makes a function with further options, which no layer overrides. A layer overrides those
of `functools.partial(attention_fn, …)` with what it passes itself.
"""

from attn_dispatch.integrations.flax.function import attention_fn
from attn_dispatch.integrations.flax.models import replace_attention
from attn_dispatch.integrations.flax.with_options import attention

__all__ = ["attention", "attention_fn", "replace_attention"]
