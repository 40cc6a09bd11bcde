"""The traits of calls that change how fast a kernel computes its tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.key_ranges import key_range
from attn_dispatch.programs.program import ModProgram


def _is_one_range(program: ModProgram | None) -> bool:
    """Whether a mask_mod leaves each query one range of keys, which needs no array of pairs."""
    return program is not None and not key_range(program).rest


_TRAITS: Mapping[str, Callable[[AttentionSpec], bool]] = {
    "causal": lambda x: x.band == (None, 0),
    "window": lambda x: x.band not in ((None, None), (None, 0)),
    "narrow window": lambda x: x.band[0] is not None and x.band[0] <= 512,
    "window in sequences": lambda x: x.is_packed and x.band not in ((None, None), (None, 0)),
    "wider keys, full": lambda x: x.band == (None, None) and x.head_dim != x.head_dim_v,
    "grouped heads": lambda x: x.num_heads > x.num_kv_heads,
    "float16": lambda x: x.dtype == "float16",
    "one query": lambda x: x.seq_len_q == 1,
    "few queries": lambda x: 1 < x.seq_len_q <= 16,
    "short rows": lambda x: 16 < x.seq_len_q <= 512,
    "other keys": lambda x: x.seq_len_q > 16 and x.seq_len_q != x.seq_len_kv,
    "short sequences": lambda x: x.is_packed and x.seq_len_q <= 256 * (x.most_sequences or 1),
    "lengths": lambda x: x.has_lengths and not x.is_paged,
    "segment ids": lambda x: x.has("query_segment_ids") and x.most_sequences is not None,
    "segment ids, any number": lambda x: x.has("query_segment_ids") and x.most_sequences is None,
    "cu_seqlens": lambda x: x.has("cu_seqlens_q"),
    "pages": lambda x: x.is_paged,
    "sinks": lambda x: x.has("sinks"),
    "soft cap": lambda x: x.meaning.logits_soft_cap is not None,
    "ALiBi": lambda x: x.has("alibi_slopes"),
    "bias": lambda x: x.has("bias"),
    "score_mod": lambda x: x.meaning.score_mod is not None,
    "mask_mod": lambda x: x.meaning.mask_mod is not None,
    "mask_mod of one range": lambda x: _is_one_range(x.meaning.mask_mod),
    "mask": lambda x: x.has("mask"),
    "several packed rows": lambda x: x.is_packed and x.batch > 1,
    "padded head dim": lambda x: x.head_dim not in (64, 96, 128, 192, 256, 512),
}

TRAITS = tuple(_TRAITS)


def traits_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The traits that a call has, in the order of TRAITS."""
    return tuple(name for name, has in _TRAITS.items() if has(spec))


HEAD_DIMS = ("64", "96", "128", "192/128", "192", "256", "384", "512", "more")
"""Classes of head dims, each with what fits it."""


def head_dims_of(spec: AttentionSpec) -> str:
    """The class of a call's head dims: the narrowest that both fit."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if 128 < spec.head_dim <= 192 and spec.head_dim_v <= 128:
        return "192/128"
    limits = (64, 96, 128, 192, 256, 384, 512)
    return next((str(x) for x in limits if widest <= x), "more")
