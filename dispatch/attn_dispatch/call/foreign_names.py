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

_COUNTERPARTS = {
    "q queries": "is query",
    "k keys key_": "is key",
    "v values": "is value",
    "softmax_scale sm_scale scale_factor scaling_factor scaling": "is scale",
    "causal": f"is is_causal{_AT_THE_END}",
    "is_causal_mask use_causal_mask causal_mask": "is is_causal",
    "causal_offset": "is causal_alignment, which may be the offset",
    "window": _WINDOW,
    "window_size": _WINDOW + _AT_THE_END,
    "sliding_window sliding_window_size": _SLIDING,
    "attn_mask attention_mask": "is mask (bool, True = attend), or bias for what is added to the "
    "scores",
    "key_padding_mask": f"{_LENGTHS}, or mask=~key_padding_mask[:, None, None, :]",
    "padding_mask": f"{_LENGTHS}, or mask=padding_mask[:, None, None, :], True = attend",
    "kv_mask": f"{_LENGTHS}, or mask=kv_mask[:, None, None, :]",
    "attn_mask_type": "is is_causal with causal_alignment, and lengths or segment ids for padding",
    "attn_bias ab": "is bias",
    "alibi": "is alibi_slopes, a slope for each head",
    "block_mask": "is mask_mod(b, n, t, s), in jax.numpy",
    "segment_ids decoder_segment_ids": "is query_segment_ids and key_value_segment_ids, ids from "
    "1 on, 0 is padding",
    "q_segment_ids": "is query_segment_ids, ids from 1 on, 0 is padding",
    "kv_segment_ids": "is key_value_segment_ids, ids from 1 on, 0 is padding",
    "max_segments_per_seq": "is max_segments",
    "cu_seqlens cu_seqlens_q cu_seqlens_kv": _RAGGED,
    "cu_seqlens_k": f"is cu_seqlens_kv; {_RAGGED}",
    "max_seqlen": "is max_seqlen_q and max_seqlen_kv of ragged_dot_product_attention",
    "max_seqlen_q": "is max_seqlen_q of ragged_dot_product_attention",
    "max_seqlen_k max_seqlen_kv": "is max_seqlen_kv of ragged_dot_product_attention",
    "sequence_descriptor": "is query_segment_ids and key_value_segment_ids, or query_seq_lengths "
    "and key_value_seq_lengths",
    "seqlens_q q_seqlen q_lens": "is query_seq_lengths",
    "seqlens_k seqlens_kv context_lens context_lengths": _LENGTHS,
    "kv_seqlen kv_lengths kv_lens cache_seqlens seqused_k": "is key_value_seq_lengths",
    "lengths seq_lens": "is query_seq_lengths and key_value_seq_lengths",
    "block_tables block_table page_indices": "is page_table of paged_attention",
    "softcap soft_cap logit_cap attn_logits_soft_cap": "is logits_soft_cap",
    "dropout dropout_p dropout_probability attention_dropout p": "is dropout_rate, with "
    "dropout_key",
    "dropout_mask": f"{_WITHOUT}: dropout_rate with dropout_key draws it, and "
    "attn_dispatch.dropout_mask returns it",
    "dropout_rng rng prng prng_key": "is dropout_key",
    "dropout_seed": "is dropout_key, a JAX PRNG key",
    "deterministic": f"{_WITHOUT}: leave dropout_rate at 0; deterministic_backward asks for "
    "gradients that are bit-equal",
    "broadcast_dropout": f"{_WITHOUT}: each pair is dropped on its own",
    "training is_training inference": f"{_WITHOUT}: leave dropout_rate at 0 where nothing is "
    "dropped",
    "precision": f"{_WITHOUT}: jax.default_matmul_precision around the program is honoured",
    "preferred_element_type": f"{_WITHOUT}: scores and sums are float32, or float64 for float64 "
    "inputs",
    "force_fp32_for_softmax": f"{_WITHOUT}: the softmax is float32, or float64 for float64 inputs",
    "attention_dtype dtype": f"{_WITHOUT}: cast query, key and value",
    "logits_sink logit_sink s_aux softmax_offset learnable_sink": "is sinks",
    "softmax_type": f"{_WITHOUT}: with sinks the softmax has a sink, otherwise none",
    "return_softmax_lse": "is return_lse",
    "return_attn_probs return_attention_scores need_weights": f"{_WITHOUT}: kernels make no "
    "probabilities; return_lse has the logarithm of their denominator",
    "enable_gqa num_kv_heads num_key_value_heads": _BY_SHAPE,
    "num_splits": _NO_SPLITS,
    "pack_gqa": f"{_WITHOUT}: whether heads of a group are rows of a tile is the kernel's choice",
    "normalize_output": f"{_WITHOUT}: the output is normalised; return_lse has the logarithm of "
    "its denominator",
    "q_sharding": f"{_WITHOUT}: the call follows the shardings of its arrays",
    "layout qkv_format input_layout page_layout": _AXES,
    "flash_attention backend": 'is implementation: "cudnn", "flash", "aiter", "xla"',
    "module": f"{_WITHOUT}; attn_dispatch.integrations.flax has an attention_fn",
    "target": f"{_WITHOUT}: make the call in the block `with attn_dispatch.target(...)`",
    "mask_fn": "is mask_mod(b, n, t, s), a function of scalars",
}
"""By foreign names, their counterpart here, as the end of a sentence."""

NAMES = {name: here for names, here in _COUNTERPARTS.items() for name in names.split()}


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


signature_of = functools.cache(inspect.signature)


def hints_at_foreign_names(call: Callable[P, R]) -> Callable[P, R]:
    """The call, whose TypeError for an unknown argument name gives the name here."""
    own = signature_of(call).parameters.keys()

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
    own = signature_of(call).parameters
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
