"""The public calls: their signatures and documentation. core/primitive.py computes a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.arguments import Arguments, with_known_lengths
from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.call.foreign_names import hints_at_foreign_names
from attn_dispatch.call.keywords import DenseOptions, RaggedOptions
from attn_dispatch.call.layouts import QkvLayout
from attn_dispatch.call.normal_form import Call
from attn_dispatch.call.options import CausalAlignment
from attn_dispatch.call.static_arguments import Implementations, Window, check_positive_int
from attn_dispatch.call_steps import Four, No, Results, Three, Two, Yes, normal_form, run
from attn_dispatch.programs.functions import MaskMod, ScoreMod


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: No = False, return_lse: No = False, return_max_logits: No = False,
    **options: Unpack[DenseOptions],
) -> jax.Array: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: Yes, return_lse: No = False, return_max_logits: No = False,
    **options: Unpack[DenseOptions],
) -> Two: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: No = False, return_lse: Yes, return_max_logits: No = False,
    **options: Unpack[DenseOptions],
) -> Two: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: No = False, return_lse: No = False, return_max_logits: Yes,
    **options: Unpack[DenseOptions],
) -> Two: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: Yes, return_lse: Yes, return_max_logits: No = False,
    **options: Unpack[DenseOptions],
) -> Three: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: Yes, return_lse: No = False, return_max_logits: Yes,
    **options: Unpack[DenseOptions],
) -> Three: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: No = False, return_lse: Yes, return_max_logits: Yes,
    **options: Unpack[DenseOptions],
) -> Three: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: Yes, return_lse: Yes, return_max_logits: Yes,
    **options: Unpack[DenseOptions],
) -> Four: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *,
    return_residual: bool = False, return_lse: bool = False, return_max_logits: bool = False,
    **options: Unpack[DenseOptions],
) -> Results: ...  # fmt: skip
@hints_at_foreign_names
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment | ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic_backward: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    max_segment_len: int | None = None,
    finite_padding: bool | None = None,
    score_mod: ScoreMod | None = None,
    score_mod_args: Sequence[object] = (),
    mask_mod: MaskMod | None = None,
    mask_mod_args: Sequence[object] = (),
    qkv_layout: QkvLayout | None = None,
    implementation: Implementations = None,
    context_axis: str | Sequence[str] | None = None,
    sequence_order: SequenceOrder = "contiguous",
    return_residual: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Results:
    """Attention: softmax(scale · query · keyᵀ, masked) · value, by the best kernel for the device.

    Takes the arguments of `jax.nn.dot_product_attention`, with the same meaning, and more:

        out = dot_product_attention(q, k, v, is_causal=True)
        out, lse = dot_product_attention(
            q, k, v, is_causal=True, query_segment_ids=ids, max_segments=8, return_lse=True
        )

    Letters in shapes: B batch (any number of leading dims, or none), T queries, S keys, N query
    heads, K key/value heads, H and V head dims. N must be a multiple of K; query head n uses
    key/value head n // (N // K), so that keys are not repeated for GQA and MQA.

    Each score goes through, in this order: scale, soft cap, score_mod, bias, ALiBi, mask, and the
    softmax over the keys and the sink. A row that may attend to no key has output and gradients 0
    and lse -inf. NaN and Inf in padding do not reach anything else.

    Wrong lengths, segment ids and windows are a ValueError where checking them needs no wait for
    the device: in NumPy arrays, lists, numbers, and untraced JAX arrays on a CPU. Elsewhere, such
    as under `jax.jit`, they make the output, lse and maxima of their rows NaN, on every
    implementation, and no gradient goes through those rows. With ATTN_DISPATCH_CHECK=1 in the
    environment they are a ValueError there too, at the cost of a wait.

    Args:
      query: [B, T, N, H]; float16, bfloat16, float32, or float64 under x64.
      key: [B, S, K, H], in query's dtype.
      value: [B, S, K, V], in query's dtype.
      bias: floating, broadcastable to [B, N, T, S], also from a lower rank; added to the scores.
        Differentiable.
      mask: bool, True = attend; shapes as for bias. A dense mask is read in full: prefer lengths,
        windows and segment ids, which let kernels skip work.
      scale: the factor of the scores; 1/sqrt(H) if None (arXiv:1706.03762). Either a number,
        which may be 0 or negative, and otherwise must be a normal float32 (float64 for float64
        inputs). Or a floating array, [] or, one for each head, [N]: it may be traced and is
        differentiable, but is multiplied into query beforehand, which rounds
        query · scale · sqrt(H) to query's dtype.
      is_causal: query i sees only keys j <= i + offset; the offset is that of causal_alignment.
      causal_alignment: "top_left" for offset 0, as in jax.nn; "bottom_right" for S - T, computed
        from a row's or segment's actual lengths if they are given. Use the latter for queries
        behind a cache. Windows and ALiBi move with it. None is "top_left", with a warning where it
        is probably not meant. Or the offset itself, which may be negative: an int, with which
        kernels skip most, or integers [] or [B], which may be traced. Lengths do not move it, and
        segments count it from their first query and key. Offsets beyond ±2^29 count as ±2^29.
      query_seq_lengths: [B] integers from 0 to T; queries at or past the length are padding. A
        traced length out of that range makes its whole batch row NaN.
      key_value_seq_lengths: [B] integers from 0 to S; keys at or past the length are padding.
        Traced ones out of range as for query_seq_lengths.
      local_window_size: (left, right), inclusive: query i sees keys j with
        i + offset - left <= j <= i + offset + right; w means (w, w). None on a side leaves it open.
        A side may also be a traced integer array [], for example from a scan over layers; kernels
        then run the window as a mask.
      logits_soft_cap: c > 0, of a size as for scale: scores become c · tanh(score / c)
        (arXiv:2408.00118). None: no cap.
      alibi_slopes: floating [N] or [B, N]; slope · |i + offset - j| is subtracted from the score
        (arXiv:2108.12409). Differentiable.
      sinks: floating [N] or [B, N]; one more logit per head in the softmax denominator, without a
        value (arXiv:2508.10925). Differentiable.
      dropout_rate: static, 0 <= rate < 1; probabilities are dropped after the softmax, and the
        others divided by 1 - rate.
      dropout_key: a JAX PRNG key, needed if dropout_rate > 0. The same key gives the same mask on
        the same implementation; `dropout_mask` returns it.
      deterministic_backward: require gradients that are bit-equal from call to call. Kernels that
        cannot do that do not run the call.
      query_segment_ids: [B, T] integers, the segment (document) of each query; a query attends only
        to keys of its own segment. Id 0 is padding, which attends to nothing. Causality, windows
        and alignment count positions inside the segment. With max_segments, each segment must be in
        one piece and ids must ascend along the row; padding may stand before, between and after
        them. Without it, ids may be in any order. A traced id below 0 or above max_segments makes
        its row NaN; with max_segments, an id out of order, on either side, makes all rows of that
        id NaN.
      key_value_segment_ids: [B, S]; may be left out if T == S and they equal query_segment_ids.
      max_segments: static, an upper bound on the segment ids. Kernels for packed sequences need it.
      max_segment_len: static, with max_segments: an upper bound on the length of a segment, in
        queries and in keys. Kernels then plan for shorter sequences, which can be faster. A traced
        segment that is longer is NaN. A bound beyond T and S is the same as none.
      finite_padding: True promises that query, key, value and the output's gradient hold finite
        numbers in padding, and that no traced length or id is wrong. FlashAttention's kernels then
        need not set padding to 0 first, for which XLA copies arrays that anything else reads. If
        padding holds NaN or Inf all the same, the output and gradients of a sequence beside it may
        be NaN; padding itself still has output and gradients 0. False promises nothing; None leaves
        it to the setting `attn_dispatch.finite_padding`.
      score_mod: a function of scalars in plain JAX, (score, b, n, t, s, *score_mod_args) -> score.
        b counts the batch dims as one, n query heads, t and s positions inside the sequence or
        segment; inside `jax.shard_map`, b and n are those of the device's part. Floating arrays
        that it captures or is given are differentiable. Its result for a pair that may not attend
        is ignored.
      score_mod_args: further arguments of score_mod: arrays, or pytrees of them.
      mask_mod: a function of scalars in plain JAX, (b, n, t, s, *mask_mod_args) -> bool; True =
        attend, if causality and the other masks allow it too.
      mask_mod_args: further arguments of mask_mod.
      qkv_layout: the order of axes: "BTNH", or "BNTH" for query [B, N, T, H], key [B, K, S, H] and
        value [B, K, S, V]. With "BNTH" the output is [B, N, T, V], and lse, the residual and the
        maxima are [B, N, T]. cuDNN reads and writes either without copies; only the
        backward pass with lengths or segment ids copies "BNTH". None is "BTNH", with a warning
        where the arrays look like the other order.
      implementation: None for the best available, and XLA if no kernel can run the call, with a
        warning (see `fallback`). A name ("cudnn", "flash", "fa4", "aiter", "xla"), or a list of
        names in order of preference, takes exactly that, or raises with every reason.
      context_axis: inside `jax.shard_map`, the mesh axis or axes that the sequence is spread over:
        T and S are then the rows and keys of one device, causality, windows and segments count
        in the whole sequence, and bias and mask have columns for all its keys. How devices
        exchange keys is the setting of `context_parallel`. Under `jax.jit` alone, shard the
        arrays instead.
      sequence_order: with context_axis, which rows a device has: "contiguous"; or "zigzag", in
        which causal calls are balanced (`attn_dispatch.sequence.reorder`); or "documents", in which
        they are with segment ids (`attn_dispatch.sequence.balance`).
      return_residual: also return jax.nn's residual: the lse as [B, T, N] in key's dtype, without a
        gradient.
      return_lse: also return the natural logarithm of the softmax denominator, sink included:
        [B, T, N] float32 (float64 for float64 inputs). Differentiable.
      return_max_logits: also return each row's largest score among the keys that it may attend to,
        as the softmax sees it but without the sink: [B, T, N] float32 (float64 for float64 inputs),
        -inf where a row attends to nothing, no gradient. Its maximum over B and T is what QK-Clip
        watches (arXiv:2507.20534).

    Returns:
      The output [B, T, N, V] in query's dtype. With return_residual, return_lse or
      return_max_logits, a tuple: the output, then the residual, the lse and the maxima, those that
      were asked for, in this order.

    Raises:
      ValueError: the call is wrong; the message says what was expected and what was given.
      NotImplementedError: no implementation that may run the call can; the message gives every
        reason. Raised when the call is lowered, which under `jax.jit` is when it is compiled.
    """
    arguments = with_known_lengths(
        Arguments(
            query=query,
            key=key,
            value=value,
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            deterministic_backward=deterministic_backward,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            max_segments=max_segments,
            max_segment_len=max_segment_len,
            finite_padding=finite_padding,
            score_mod=score_mod,
            score_mod_args=score_mod_args,
            mask_mod=mask_mod,
            mask_mod_args=mask_mod_args,
            qkv_layout=qkv_layout,
            implementation=implementation,
            context_axis=context_axis,
            sequence_order=sequence_order,
            return_residual=return_residual,
            return_lse=return_lse,
            return_max_logits=return_max_logits,
        )
    )
    return run(normal_form(arguments), arguments)


@overload
def ragged_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike, max_seqlen_q: int, max_seqlen_kv: int,
    return_lse: No = False, return_max_logits: No = False, **options: Unpack[RaggedOptions],
) -> jax.Array: ...  # fmt: skip
@overload
def ragged_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike, max_seqlen_q: int, max_seqlen_kv: int,
    return_lse: Yes, return_max_logits: No = False, **options: Unpack[RaggedOptions],
) -> Two: ...  # fmt: skip
@overload
def ragged_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike, max_seqlen_q: int, max_seqlen_kv: int,
    return_lse: No = False, return_max_logits: Yes, **options: Unpack[RaggedOptions],
) -> Two: ...  # fmt: skip
@overload
def ragged_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike, max_seqlen_q: int, max_seqlen_kv: int,
    return_lse: Yes, return_max_logits: Yes, **options: Unpack[RaggedOptions],
) -> Three: ...  # fmt: skip
@overload
def ragged_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike, max_seqlen_q: int, max_seqlen_kv: int,
    return_lse: bool = False, return_max_logits: bool = False, **options: Unpack[RaggedOptions],
) -> Results: ...  # fmt: skip
@hints_at_foreign_names
def ragged_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment | ArrayLike | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic_backward: bool = False,
    finite_padding: bool | None = None,
    score_mod: ScoreMod | None = None,
    score_mod_args: Sequence[object] = (),
    mask_mod: MaskMod | None = None,
    mask_mod_args: Sequence[object] = (),
    implementation: Implementations = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Results:
    """Attention within each of M sequences that are packed one after the other.

        out = ragged_dot_product_attention(  # documents of 3 and 5 tokens
            q, k, v, cu_seqlens_q=[0, 3, 8], cu_seqlens_kv=[0, 3, 8],
            max_seqlen_q=5, max_seqlen_kv=5, is_causal=True,
        )

    Sequence m has the queries cu_seqlens_q[m] … cu_seqlens_q[m + 1] - 1 and the keys
    cu_seqlens_kv[m] … cu_seqlens_kv[m + 1] - 1, and attends to no other sequence. Either may be
    empty. Rows after the last sequence are padding: their output and gradients are 0, their lse
    is -inf, and what they hold does not reach anything else.

    Wrong cu_seqlens are a ValueError where checking them needs no wait for the device: in NumPy
    arrays, lists, and untraced JAX arrays on a CPU. Elsewhere, cu_seqlens that do not ascend from 0
    or go past the arrays make every row NaN, and a sequence that is too long makes its own rows
    NaN. No other memory is read, and no gradient goes through such rows. With ATTN_DISPATCH_CHECK=1
    in the environment they are a ValueError there too.

    Args:
      query: [T, N, H]; float16, bfloat16, float32, or float64 under x64.
      key: [S, K, H], in query's dtype.
      value: [S, K, V], in query's dtype.
      cu_seqlens_q: [M + 1] integers, ascending from 0 to at most T.
      cu_seqlens_kv: [M + 1] integers, ascending from 0 to at most S.
      max_seqlen_q: static, an upper bound on the number of queries of a sequence.
      max_seqlen_kv: static, an upper bound on the number of keys of a sequence.
      scale: a number, or a floating array [] or [N]; 1/sqrt(H) if None. This and all arguments
        below mean what they mean in `dot_product_attention`.
      is_causal: causality, windows, alignment and ALiBi count positions inside the sequence.
      causal_alignment: "top_left", "bottom_right", or the offset in each sequence, an int or an
        integer array []; None as in `dot_product_attention`.
      local_window_size: (left, right), inclusive, or w for (w, w); None leaves a side open.
      logits_soft_cap: c > 0; scores become c · tanh(score / c).
      alibi_slopes: [N] floating, the same in every sequence.
      sinks: [N] floating, the same in every sequence.
      dropout_rate: static, 0 <= rate < 1.
      dropout_key: a JAX PRNG key, needed if dropout_rate > 0.
      deterministic_backward: require gradients that are bit-equal from call to call.
      finite_padding: True promises finite numbers in the rows after the last sequence, and right
        cu_seqlens; where the last number is known to be the number of rows, there are no such rows.
      score_mod: (score, b, n, t, s, *score_mod_args) -> score; b is the number of the sequence.
      score_mod_args: further arguments of score_mod.
      mask_mod: (b, n, t, s, *mask_mod_args) -> bool; b is the number of the sequence.
      mask_mod_args: further arguments of mask_mod.
      implementation: None, a name, or a list of names.
      return_lse: also return the natural logarithm of the softmax denominator, sink included:
        [T, N] float32 (float64 for float64 inputs). Differentiable.
      return_max_logits: also return each row's largest score, as for `dot_product_attention`:
        [T, N].

    Returns:
      The output [T, N, V] in query's dtype. With return_lse or return_max_logits, a tuple: the
      output, then the lse and the maxima, those that were asked for, in this order.

    Raises:
      ValueError: the call is wrong; the message says what was expected and what was given.
      NotImplementedError: no implementation that may run the call can; the message gives every
        reason. Raised when the call is lowered, which under `jax.jit` is when it is compiled.
    """
    arguments = with_known_lengths(
        Arguments(
            query=query,
            key=key,
            value=value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            scale=scale,
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            deterministic_backward=deterministic_backward,
            finite_padding=finite_padding,
            score_mod=score_mod,
            score_mod_args=score_mod_args,
            mask_mod=mask_mod,
            mask_mod_args=mask_mod_args,
            implementation=implementation,
            return_lse=return_lse,
            return_max_logits=return_max_logits,
        )
    )
    return run(ragged_call(arguments), arguments)


def ragged_call(arguments: Arguments) -> Call:
    """The checked call with the arguments of `ragged_dot_product_attention`.

    Raises:
      ValueError: if an argument is wrong; the message has what was expected and what was given.
    """
    arguments = replace(
        arguments,
        max_seqlen_q=check_positive_int("max_seqlen_q", arguments.max_seqlen_q),
        max_seqlen_kv=check_positive_int("max_seqlen_kv", arguments.max_seqlen_kv),
    )
    a, given = arguments, arguments.arrays
    arrays = {"query": (a.query, "[T, N, H]"), "key": (a.key, "[S, K, H]")}
    arrays["value"] = (a.value, "[S, K, V]")
    for name, (x, axes) in arrays.items():
        shape = [] if x is None else [*jnp.shape(x)]
        if len(shape) != 3:
            hint = "; dot_product_attention takes batches" if len(shape) == 4 else ""
            raise ValueError(f"{name}: expected {axes}, got {shape}{hint}")
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if name not in given:
            raise ValueError(f"{name}: expected an array of integers, got None")
    return normal_form(arguments)
