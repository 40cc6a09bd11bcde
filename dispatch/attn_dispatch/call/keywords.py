"""The arguments of the public calls by name, as types for functions that pass them on.

Each argument has the name and type that it has in the signatures of `dot_product_attention`,
`ragged_dot_product_attention` and `paged_attention`. A is what stands for an array: an `ArrayLike`,
or, where nothing is computed, also a `jax.ShapeDtypeStruct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypedDict, TypeVar

from jax.typing import ArrayLike

from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.call.options import CausalAlignment
from attn_dispatch.call.static_arguments import Implementations, KvLayout, QkvLayout, Side, Window
from attn_dispatch.programs.functions import MaskMod, ScoreMod

A = TypeVar("A")


class _OfEveryCall(TypedDict, Generic[A], total=False):
    logits_soft_cap: float | None
    alibi_slopes: A | None
    sinks: A | None
    score_mod: ScoreMod | None
    score_mod_args: Sequence[object]


class _WithoutPages(_OfEveryCall[A], Generic[A], total=False):
    causal_alignment: CausalAlignment | A | None
    deterministic_backward: bool
    finite_padding: bool | None
    mask_mod: MaskMod | None
    mask_mod_args: Sequence[object]


class SharedArguments(_WithoutPages[A], Generic[A], total=False):
    """The arguments that layers of frameworks do not pass themselves, without the window."""

    query_seq_lengths: A | None
    key_value_seq_lengths: A | None
    query_segment_ids: A | None
    key_value_segment_ids: A | None
    max_segments: int | None
    max_segment_len: int | None
    qkv_layout: QkvLayout | None


class LayerOptions(SharedArguments[ArrayLike], total=False):
    """What each layer of a framework passes on from its caller."""

    local_window_size: Window
    implementation: Implementations


class _Scores(TypedDict, total=False):
    scale: ArrayLike | None
    is_causal: bool
    local_window_size: Window
    implementation: Implementations


class _Dropout(TypedDict, total=False):
    dropout_rate: float
    dropout_key: ArrayLike | None


class DenseOptions(SharedArguments[ArrayLike], _Scores, _Dropout, total=False):
    """The arguments of `dot_product_attention` that do not change how many results it has."""

    context_axis: str | Sequence[str] | None
    sequence_order: SequenceOrder


class RaggedOptions(_WithoutPages[ArrayLike], _Scores, _Dropout, total=False):
    """The same of `ragged_dot_product_attention`, but for the sequences' bounds."""


class PagedOptions(_OfEveryCall[ArrayLike], _Scores, total=False):
    """The same of `paged_attention`."""

    query_seq_lengths: ArrayLike | None
    cu_seqlens_q: ArrayLike | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    kv_layout: KvLayout


class CallArguments(SharedArguments[A], Generic[A], total=False):
    """All arguments of the three public calls."""

    local_window_size: Window | A | Sequence[Side | A]
    query: A
    key: A
    value: A
    bias: A | None
    mask: A | None
    scale: A | None
    is_causal: bool
    dropout_rate: float
    dropout_key: A | None
    cu_seqlens_q: A | None
    cu_seqlens_kv: A
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    key_pages: A
    value_pages: A | None
    page_table: A
    kv_layout: KvLayout
    implementation: Implementations
    context_axis: str | Sequence[str] | None
    sequence_order: SequenceOrder
    return_residual: bool
    return_lse: bool
    return_max_logits: bool
