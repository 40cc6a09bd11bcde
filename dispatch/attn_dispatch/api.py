"""`dot_product_attention`: its signature and documentation. core/primitive.py computes a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack, overload

import jax
from jax.typing import ArrayLike

from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.call.keywords import DenseOptions
from attn_dispatch.call.options import CausalAlignment
from attn_dispatch.call.static_arguments import Implementations, QkvLayout, Window
from attn_dispatch.call_steps import (
    Four,
    No,
    Results,
    Three,
    Two,
    Yes,
    normal_form,
    public_call,
    run,
)
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
@public_call(lambda arguments: run(normal_form(arguments), arguments))
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
    ...
