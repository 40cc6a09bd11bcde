"""The rules that the kernels of several vendors have in common."""

from __future__ import annotations

from typing import Any

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Rule

DTYPE = Rule[Any](
    "dtype",
    lambda c: c.dtype not in ("float16", "bfloat16"),
    "needs float16 or bfloat16, got {dtype}",
    "cast query, key and value to bfloat16",
    facts=lambda c: {"dtype": c.dtype},
)
"""Of an AttentionSpec, or of a vendor's own description of a call, which has a dtype too."""

MAX_SEGMENTS = Rule[AttentionSpec](
    "max_segments",
    lambda s: s.has("query_segment_ids") and s.meaning.max_segments is None,
    "segment ids: pass max_segments, the largest id",
    "pass max_segments, the largest id that any row may hold",
)

EMPTY = Rule[AttentionSpec](
    "empty",
    lambda s: s.is_empty or 0 in (s.head_dim, s.head_dim_v),
    "an axis has length zero, so there is nothing to compute",
    "none is needed",
)

ROW_BIAS_GRADIENT = Rule[AttentionSpec](
    "row_bias_gradient",
    # They cancel, and kernels have rounded each of them to 16 bits by then.
    lambda s: "bias" in s.wanted.gradients and s.shape("bias")[3] == 1,
    "the gradient of a bias that is the same for all keys would be inaccurate",
    lambda s: _without_it(s),
)

DROPOUT_KEYS = Rule[AttentionSpec](
    "dropout_keys",
    lambda s: s.meaning.dropout_rate > 0 and s.shape("dropout_key")[0] > 1,
    "several dropout keys in one call",
    "pass one dropout_key for the whole batch",
)


def _without_it(spec: AttentionSpec) -> str:
    """Softmax cancels such a bias, unless there is a sink, but for lse."""
    if spec.has("sinks") or spec.has("lse_grad"):
        return ""
    return "leave that bias out, or jax.lax.stop_gradient of it: it changes lse alone"
