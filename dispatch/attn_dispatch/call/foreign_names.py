"""Arguments by the names of other libraries: the error gives the name in this one."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from attn_dispatch.choices import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

_WITHOUT = "has no counterpart"
_RAGGED = "ragged_dot_product_attention takes cu_seqlens_q and cu_seqlens_kv"
_BY_SHAPE = f"{_WITHOUT}: heads are grouped if query has a multiple of key's heads"
_AXES = 'is qkv_layout, "BTNH" or "BNTH", and of pages kv_layout, "NHD" or "HND"'
_AT_THE_END = '; flash-attn\'s alignment is causal_alignment="bottom_right"'
_WINDOW = "is local_window_size, both ends included; an open side is None, not -1"
_SLIDING = "is local_window_size: (W - 1, 0) for W keys, the query's own included"
_NO_SPLITS = f"{_WITHOUT}: how the keys of a query are split is the kernel's choice"
_LENGTHS = "is key_value_seq_lengths: the numbers of keys [batch]"

NAMES = {
    "q": "is query",
    "k": "is key",
    "v": "is value",
    "queries": "is query",
    "keys": "is key",
    "values": "is value",
    "key_": "is key",
    "softmax_scale": "is scale",
    "sm_scale": "is scale",
    "scale_factor": "is scale",
    "scaling_factor": "is scale",
    "scaling": "is scale",
    "causal": f"is is_causal{_AT_THE_END}",
    "is_causal_mask": "is is_causal",
    "use_causal_mask": "is is_causal",
    "causal_mask": "is is_causal",
    "causal_offset": "is causal_alignment, which may be the offset",
    "window": _WINDOW,
    "window_size": _WINDOW + _AT_THE_END,
    "sliding_window": _SLIDING,
    "sliding_window_size": _SLIDING,
    "attn_mask": "is mask (bool, True = attend), or bias for what is added to the scores",
    "attention_mask": "is mask (bool, True = attend), or bias for what is added to the scores",
    "key_padding_mask": f"{_LENGTHS}, or mask=~key_padding_mask[:, None, None, :]",
    "padding_mask": f"{_LENGTHS}, or mask=padding_mask[:, None, None, :], True = attend",
    "kv_mask": f"{_LENGTHS}, or mask=kv_mask[:, None, None, :]",
    "attn_mask_type": "is is_causal with causal_alignment, and lengths or segment ids for padding",
    "attn_bias": "is bias",
    "alibi": "is alibi_slopes, a slope for each head",
    "block_mask": "is mask_mod(b, n, t, s), in jax.numpy",
    "ab": "is bias",
    "segment_ids": "is query_segment_ids and key_value_segment_ids, ids from 1 on, 0 is padding",
    "decoder_segment_ids": "is query_segment_ids and key_value_segment_ids, ids from 1 on, 0 is "
    "padding",
    "q_segment_ids": "is query_segment_ids, ids from 1 on, 0 is padding",
    "kv_segment_ids": "is key_value_segment_ids, ids from 1 on, 0 is padding",
    "max_segments_per_seq": "is max_segments",
    "cu_seqlens": _RAGGED,
    "cu_seqlens_q": _RAGGED,
    "cu_seqlens_k": f"is cu_seqlens_kv; {_RAGGED}",
    "cu_seqlens_kv": _RAGGED,
    "max_seqlen": "is max_seqlen_q and max_seqlen_kv of ragged_dot_product_attention",
    "max_seqlen_q": "is max_seqlen_q of ragged_dot_product_attention",
    "max_seqlen_k": "is max_seqlen_kv of ragged_dot_product_attention",
    "max_seqlen_kv": "is max_seqlen_kv of ragged_dot_product_attention",
    "sequence_descriptor": "is query_segment_ids and key_value_segment_ids, or "
    "query_seq_lengths and key_value_seq_lengths",
    "seqlens_q": "is query_seq_lengths",
    "seqlens_k": _LENGTHS,
    "seqlens_kv": _LENGTHS,
    "q_seqlen": "is query_seq_lengths",
    "kv_seqlen": "is key_value_seq_lengths",
    "kv_lengths": "is key_value_seq_lengths",
    "kv_lens": "is key_value_seq_lengths",
    "q_lens": "is query_seq_lengths",
    "lengths": "is query_seq_lengths and key_value_seq_lengths",
    "seq_lens": "is query_seq_lengths and key_value_seq_lengths",
    "cache_seqlens": "is key_value_seq_lengths",
    "context_lens": _LENGTHS,
    "context_lengths": _LENGTHS,
    "seqused_k": "is key_value_seq_lengths",
    "block_tables": "is page_table of paged_attention",
    "block_table": "is page_table of paged_attention",
    "page_indices": "is page_table of paged_attention",
    "softcap": "is logits_soft_cap",
    "soft_cap": "is logits_soft_cap",
    "logit_cap": "is logits_soft_cap",
    "attn_logits_soft_cap": "is logits_soft_cap",
    "dropout": "is dropout_rate, with dropout_key",
    "dropout_p": "is dropout_rate, with dropout_key",
    "dropout_probability": "is dropout_rate, with dropout_key",
    "attention_dropout": "is dropout_rate, with dropout_key",
    "dropout_mask": f"{_WITHOUT}: dropout_rate with dropout_key draws it, and "
    "attn_dispatch.dropout_mask returns it",
    "p": "is dropout_rate, with dropout_key",
    "dropout_rng": "is dropout_key",
    "rng": "is dropout_key",
    "dropout_seed": "is dropout_key, a JAX PRNG key",
    "prng": "is dropout_key",
    "prng_key": "is dropout_key",
    "deterministic": "has no counterpart: leave dropout_rate at 0; deterministic_backward asks for "
    "gradients that are bit-equal",
    "broadcast_dropout": "has no counterpart: each pair is dropped on its own",
    "training": "has no counterpart: leave dropout_rate at 0 where nothing is dropped",
    "is_training": "has no counterpart: leave dropout_rate at 0 where nothing is dropped",
    "inference": "has no counterpart: leave dropout_rate at 0 where nothing is dropped",
    "precision": "has no counterpart: jax.default_matmul_precision around the program is honoured",
    "preferred_element_type": "has no counterpart: scores and sums are float32, or float64 for "
    "float64 inputs",
    "force_fp32_for_softmax": "has no counterpart: the softmax is float32, or float64 for "
    "float64 inputs",
    "attention_dtype": "has no counterpart: cast query, key and value",
    "dtype": "has no counterpart: cast query, key and value",
    "logits_sink": "is sinks",
    "logit_sink": "is sinks",
    "s_aux": "is sinks",
    "softmax_type": f"{_WITHOUT}: with sinks the softmax has a sink, otherwise none",
    "softmax_offset": "is sinks",
    "learnable_sink": "is sinks",
    "return_softmax_lse": "is return_lse",
    "return_attn_probs": f"{_WITHOUT}: kernels make no probabilities; return_lse has the logarithm "
    "of their denominator",
    "return_attention_scores": f"{_WITHOUT}: kernels make no probabilities; return_lse has the "
    "logarithm of their denominator",
    "need_weights": f"{_WITHOUT}: kernels make no probabilities; return_lse has the logarithm of "
    "their denominator",
    "enable_gqa": _BY_SHAPE,
    "num_kv_heads": _BY_SHAPE,
    "num_key_value_heads": _BY_SHAPE,
    "num_splits": _NO_SPLITS,
    "pack_gqa": f"{_WITHOUT}: whether heads of a group are rows of a tile is the kernel's choice",
    "normalize_output": f"{_WITHOUT}: the output is normalised; return_lse has the logarithm of "
    "its denominator",
    "q_sharding": f"{_WITHOUT}: the call follows the shardings of its arrays",
    "layout": _AXES,
    "qkv_format": _AXES,
    "input_layout": _AXES,
    "page_layout": _AXES,
    "flash_attention": 'is implementation: "cudnn", "flash", "aiter", "xla"',
    "backend": 'is implementation: "cudnn", "flash", "aiter", "xla"',
    "module": f"{_WITHOUT}; attn_dispatch.integrations.flax has an attention_fn",
    "target": f"{_WITHOUT}: make the call in the block `with attn_dispatch.target(...)`",
    "mask_fn": "is mask_mod(b, n, t, s), a function of scalars",
}
"""By the foreign name, its counterpart here, as the end of a sentence."""


_OF_PAGES = {
    "lengths": _LENGTHS,
    "seq_lens": _LENGTHS,
    "mask_mod": f"{_WITHOUT}: return -jnp.inf from a score_mod",
}
"""The same for paged_attention, where it differs."""

_NAMED = frozenset(re.findall(r"^is (\w+)", "\n".join(NAMES.values()), re.M)) | {"kv_layout"}
"""The arguments that hints name."""

_OF_A_CALL = re.compile(r" of (?:ragged_dot_product|paged)_attention$")
"""The end of a hint at an argument of another call."""


def hints_at_foreign_names(call: Callable[P, R]) -> Callable[P, R]:
    """The call, whose TypeError for an unknown argument name gives the name here."""
    own = inspect.signature(call).parameters.keys()

    @functools.wraps(call)
    def hinting(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= own:
            check_names(call, kwargs)
        return call(*args, **kwargs)

    return hinting


def check_names(call: Callable[..., object], given: Mapping[str, object]) -> None:
    """Check the names of a call's arguments.

    Raises:
      TypeError: the call has no such arguments; the message has the name of each here, if known.
    """
    own = inspect.signature(call).parameters
    if foreign := [name for name in given if name not in own]:
        hints = [_hint(name, given[name], own, call.__name__) for name in foreign]
        raise TypeError(
            f"{call.__name__}() got an unexpected keyword argument "
            + "; ".join(f"{name!r}{hint}" for name, hint in zip(foreign, hints, strict=True))
        )


def _hint(name: str, value: object, own: Collection[str], call: str) -> str:
    names = NAMES | _OF_PAGES if call == "paged_attention" else NAMES
    if name not in names:
        return did_you_mean(name, own)
    found = names[name]
    named = _NAMED.intersection(re.findall(r"\w+", found))
    if not named.isdisjoint(own):
        found = _OF_A_CALL.sub("", found)
    elif named and found.startswith(_WITHOUT):
        found = _WITHOUT  # this call does not have the alternative either
    elif named and found.startswith("is ") and not _OF_A_CALL.search(found):
        return f": {call} has no counterpart; in dot_product_attention it {found}"
    if "causal_alignment" not in own:  # this call is always aligned at the end
        found = found.replace(_AT_THE_END, "")
    if name.startswith("window") and _is_open(value):
        found += f"; {value} means no window: leave the argument out"
    return f": here it {found}" if found.startswith(("is ", "has ")) else f": {found}"


def _is_open(value: object) -> bool:
    return isinstance(value, int | tuple | list) and value in (-1, (-1, -1), [-1, -1])
