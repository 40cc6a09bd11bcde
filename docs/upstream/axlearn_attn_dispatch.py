"""AXLearn: a backend for axlearn/common/flash_attention, as a file to put beside gpu_attention.py.

Written against what is known of `BaseFlashAttention`; neither applied nor run. It belongs first in
the list of the GPU's backends; and "context", the name under which attn_dispatch saves output and
lse, among the names that AXLearn's remat policies save.
"""

import functools

import jax
from axlearn.common.attention_bias import (
    CausalAttentionBias,
    MaskFnAttentionBias,
    SegmentIdAttentionBias,
    SlidingWindowAttentionBias,
    split,
)
from axlearn.common.flash_attention.common import BaseFlashAttention
from axlearn.common.kv_cache.kv_cache import KVCache

import attn_dispatch


class AttnDispatchFlashAttention(BaseFlashAttention):
    """cuDNN on NVIDIA, AITER on AMD, XLA elsewhere, without repeated kv heads."""

    def is_supported(self, input_batch, kv_cache_type):
        if not super().is_supported(input_batch=input_batch, kv_cache_type=kv_cache_type):
            return False
        if kv_cache_type not in (None, KVCache):
            return self._log_unsupported(f"{kv_cache_type=}")
        self._kv_cache_type = kv_cache_type
        q, k, v = (input_batch[x] for x in ("query", "key", "value"))
        options = _options(self.cfg, input_batch, kv_cache_type)
        arrays = (q, k.astype(q.dtype), v.astype(q.dtype))
        with jax.ensure_compile_time_eval():
            found = attn_dispatch.explain(*arrays, **options)
        if found.forward[0].reasons:
            return self._log_unsupported("; ".join(found.forward[0].reasons))
        return True

    @functools.partial(jax.jit, static_argnames=["self"])
    def __call__(self, input_batch):
        q, k, v = (input_batch[x] for x in ("query", "key", "value"))
        options = _options(self.cfg, input_batch, self._kv_cache_type)
        arrays = (q, k.astype(q.dtype), v.astype(q.dtype))
        return attn_dispatch.dot_product_attention(*arrays, **options)


def _options(cfg, input_batch, kv_cache_type):
    bias = input_batch["bias"]
    options = {"scale": cfg.softmax_scale, "sinks": input_batch.get("logit_sink")}
    if cfg.dropout_rate:
        options |= {"dropout_rate": cfg.dropout_rate, "dropout_key": input_batch["prng_key"]}
    if kv_cache_type is KVCache:  # the queries are the last of the cache
        mask, rest = split(bias, MaskFnAttentionBias)
        lengths = mask.target_positions[:, -1] + 1
        options |= {"key_value_seq_lengths": lengths, "causal_alignment": "bottom_right"}
        return options | {"is_causal": True, "bias": rest.value()}
    kinds = (CausalAttentionBias, SlidingWindowAttentionBias, SegmentIdAttentionBias)
    causal, sliding, segments, rest = split(bias, *kinds)
    options |= {"is_causal": causal.has_value() or sliding.has_value(), "bias": rest.value()}
    if sliding.has_value():
        options["local_window_size"] = (sliding.sliding_window_size, 0)
    if segments.has_value():  # ids from 0 there; no bound is known for max_segments
        options["query_segment_ids"] = segments.segment_ids + 1
    return options
