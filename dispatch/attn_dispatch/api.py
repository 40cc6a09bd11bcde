"""The public calls: arguments in, normal form out; see primitive.py for what happens then."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from attn_dispatch import settings
from attn_dispatch.call.arguments import ARRAY_ARGUMENTS, Call
from attn_dispatch.call.foreign_names import check_names, hints_at_foreign_names
from attn_dispatch.call.layouts import QkvLayout
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.spec import AttentionOptions, AttentionSpec, CausalAlignment
from attn_dispatch.call.static_arguments import Window, check_positive_int
from attn_dispatch.core.explanation import Explanation, explain_call
from attn_dispatch.core.mask_share import mask_share
from attn_dispatch.core.primitive import attention
from attn_dispatch.devices.target import default_device
from attn_dispatch.devices.target import target as target_block
from attn_dispatch.one_call import MaskMod, ScoreMod, normal_form, run
from attn_dispatch.paged import normalise_paged, paged_attention
from attn_dispatch.programs.tracing import Mod, trace

_READ_BY_MODS = ("score_mod_args", "mask_mod_args")


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
    causal_alignment: CausalAlignment = "top_left",
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
    score_mod: ScoreMod | None = None,
    score_mod_args: Sequence[Any] = (),
    mask_mod: MaskMod | None = None,
    mask_mod_args: Sequence[Any] = (),
    qkv_layout: QkvLayout = "BTNH",
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Any:
    """Attention: softmax(scale · query · keyᵀ, masked) · value, by the best kernel for the device.

    `jax.nn.dot_product_attention`'s signature and meaning is a subset of this one. Letters: B batch
    (any number of leading dims, or none), T queries, S keys, N heads, K key/value heads with
    N % K == 0 (query head n uses key/value head n // (N // K)), H and V head dims.

    A score goes through, in this order: scale, soft cap, score_mod, bias, ALiBi, mask, softmax over
    the keys and the sink. A row that may attend to no key has output and gradients 0 and lse -inf.
    NaN and Inf in padding reach nothing.

    Lengths, segment ids and windows are checked where that costs no wait: in NumPy arrays, lists,
    numbers, and JAX arrays on a CPU that are not traced. Elsewhere, under `jax.jit` above all, what
    would be a ValueError makes NaN, on every implementation: output, lse and maxima of the rows
    that it concerns are NaN, and no gradient goes through them. ATTN_DISPATCH_CHECK=1 in the
    environment checks there as well, at the cost of a wait.

    Args:
      query: [B, T, N, H]; float16, bfloat16, float32, or float64 under x64.
      key: [B, S, K, H], query's dtype.
      value: [B, S, K, V], query's dtype.
      bias: added to the scores; floating, broadcastable to [B, N, T, S], a lower rank extending to
        the left. Differentiable.
      mask: bool, True = attend; shapes as for bias. A dense mask costs its full size in memory
        traffic: prefer lengths, windows and segment ids, which are descriptions.
      scale: a number, 0 and below included, else of a size that is a normal float32 (float64 for
        float64 inputs); 1/sqrt(H) if None (arXiv:1706.03762). Or a floating array, [] and traced
        or [N], one for each head: differentiable. Such a scale goes into query beforehand, which
        rounds query · scale · sqrt(H) to query's dtype.
      is_causal: query i sees keys j <= i + offset.
      causal_alignment: offset 0 for "top_left", as in jax.nn; S - T for "bottom_right", taken from
        a row's actual lengths, or its segment's, where they are given. Windows and ALiBi shift
        with it.
      query_seq_lengths: [B] integers from 0 to T; rows at or past the length attend nothing.
        Traced lengths out of that range make all rows of their batch row NaN.
      key_value_seq_lengths: [B] integers from 0 to S; keys at or past the length are not attended.
        Traced ones out of that range likewise.
      local_window_size: w or (left, right), inclusive: query i sees keys j with
        i + offset - left <= j <= i + offset + right; None on a side leaves it open. A side may be a
        traced integer array [], from a scan over layers for example; kernels take that as a mask.
      logits_soft_cap: c > 0, of a size as for scale; scores become c · tanh(score / c)
        (arXiv:2408.00118).
      alibi_slopes: [N] or [B, N]; slope · |i + offset - j| is subtracted from the score
        (arXiv:2108.12409). Differentiable.
      sinks: [N] or [B, N]; a logit per head that joins the softmax denominator and has no value
        (arXiv:2508.10925). Differentiable.
      dropout_rate: static, 0 <= rate < 1; probabilities are dropped after the softmax, the kept
        ones divided by 1 - rate.
      dropout_key: a JAX PRNG key; needed if dropout_rate > 0. The same key gives the same mask on
        the same implementation; see `dropout_mask`.
      deterministic_backward: ask for bit-equal gradients from call to call; honoured, or a reason.
      query_segment_ids: [B, T] integers from 0 on; a query attends to keys of its own segment, 0 is
        padding and attends nothing. Causality, windows and alignment count positions inside the
        segment. Without max_segments ids may stand in any order. With it the places of an id follow
        one another, and ids ascend along the row; padding may stand before, between and after them.
        Traced ids below 0 or above max_segments make their rows NaN, and with max_segments an id
        out of order, on either side, all rows of that id.
      key_value_segment_ids: [B, S]; if one of the two is missing and T == S, they are equal.
      max_segments: static; the largest segment id there may be. Kernels that take packed sequences
        by their starts and lengths run segment ids only with it.
      max_segment_len: static, beside max_segments; the most places that a segment may have, among
        queries and among keys. Kernels plan for shorter sequences with it. The rows of a traced
        segment that is longer are NaN.
      score_mod: a function of scalars, (score, b, n, t, s, *score_mod_args) -> score, in plain JAX:
        n counts query heads, b the batch dims as one, t and s the places inside the sequence or
        segment; inside `jax.shard_map` b and n are those of the device's own call. Floating arrays
        that it is given or captures are differentiable. What it is where the pair may not attend
        reaches nothing.
      score_mod_args: what score_mod is given besides: arrays, or pytrees of them.
      mask_mod: a function of scalars, (b, n, t, s, *mask_mod_args) -> bool, True = attend, as far
        as causality and the other masks allow.
      mask_mod_args: what mask_mod is given besides.
      qkv_layout: "BNTH" for query [B, N, T, H], key [B, K, S, H] and value [B, K, S, V]: the output
        is [B, N, T, V] then, and lse, the residual and the maxima are [B, N, T]. It says how arrays
        lie in memory: cuDNN reads and writes them in that order, gradients too.
      implementation: None takes the best available for the platform, then XLA, and says so where
        that means leaving the vendor's kernel (see `fallback`). A name ("cudnn", "aiter", "xla") or
        a list of names in order of preference takes exactly that, or raises with every reason.
      return_residual: also return jax.nn's residual: lse as [B, T, N] in key's dtype, no gradient.
      return_lse: also return the natural logarithm of the softmax denominator, sink included:
        [B, T, N] float32 (float64 for float64 inputs), differentiable.
      return_max_logits: also return the largest score that each row may attend, as the softmax sees
        it but without the sink: [B, T, N] float32 (float64 for float64 inputs), -inf where a row
        attends nothing, no gradient. Its maximum over B and T is what QK-Clip watches
        (arXiv:2507.20534).

    Returns:
      The output [B, T, N, V] in query's dtype; with return_residual, return_lse or
      return_max_logits a tuple of it, the residual, the lse and the maxima, in this order, as far
      as asked for.

    Raises:
      ValueError: the call is wrong; says what was expected and what was given.
      NotImplementedError: no implementation that may run it can; says every reason. Raised when
        the call is lowered, which under `jax.jit` means compiled.
    """
    return run(
        normal_form(
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
            score_mod=score_mod,
            score_mod_args=score_mod_args,
            mask_mod=mask_mod,
            mask_mod_args=mask_mod_args,
            qkv_layout=qkv_layout,
            implementation=implementation,
            return_residual=return_residual,
            return_lse=return_lse,
            return_max_logits=return_max_logits,
        ),
        return_residual=return_residual,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )


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
    causal_alignment: CausalAlignment = "top_left",
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic_backward: bool = False,
    score_mod: ScoreMod | None = None,
    score_mod_args: Sequence[Any] = (),
    mask_mod: MaskMod | None = None,
    mask_mod_args: Sequence[Any] = (),
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Any:
    """Attention inside each of M sequences that lie one after the other in the arrays.

    Sequence m has the queries cu_seqlens_q[m] … cu_seqlens_q[m + 1] - 1 and the keys
    cu_seqlens_kv[m] … cu_seqlens_kv[m + 1] - 1, and attends to no other sequence. Either may be
    empty. Rows after the last sequence attend nothing: their output and gradients are 0, their lse
    is -inf, and what stands in them reaches nothing.

    cu_seqlens are checked where that costs no wait: in NumPy arrays, lists, and JAX arrays on a CPU
    that are not traced. Elsewhere those that do not ascend from 0, or go past the arrays, make
    every row NaN, and a sequence that is too long its own; no other memory is read, and no gradient
    goes through such rows. ATTN_DISPATCH_CHECK=1 checks there as well.

    Args:
      query: [T, N, H]; float16, bfloat16, float32, or float64 under x64.
      key: [S, K, H], query's dtype.
      value: [S, K, V], query's dtype.
      cu_seqlens_q: [M + 1] integers, ascending from 0 to at most T.
      cu_seqlens_kv: [M + 1] integers, ascending from 0 to at most S.
      max_seqlen_q: static; no sequence may have more queries.
      max_seqlen_kv: static; no sequence may have more keys.
      scale: this and what follows as for `dot_product_attention`.
      is_causal: causality, windows, alignment and ALiBi count positions inside the sequence.
      causal_alignment: "top_left" or "bottom_right".
      local_window_size: w or (left, right), inclusive.
      logits_soft_cap: c > 0.
      alibi_slopes: [N] floating, the same in every sequence.
      sinks: [N] floating, the same in every sequence.
      dropout_rate: static.
      dropout_key: a JAX PRNG key.
      deterministic_backward: ask for bit-equal gradients from call to call.
      score_mod: (score, b, n, t, s, *score_mod_args) -> score; b is the number of the sequence.
      score_mod_args: what score_mod is given besides.
      mask_mod: (b, n, t, s, *mask_mod_args) -> bool; b is the number of the sequence.
      mask_mod_args: what mask_mod is given besides.
      implementation: None, a name, or a list of names.
      return_lse: also return the natural logarithm of the softmax denominator, sink included:
        [T, N] float32 (float64 for float64 inputs), differentiable.
      return_max_logits: also return the largest score that each row may attend, as for
        `dot_product_attention`: [T, N].

    Returns:
      The output [T, N, V] in query's dtype; with return_lse or return_max_logits a tuple of it, the
      lse and the maxima, in this order, as far as asked for.

    Raises:
      ValueError: the call is wrong; says what was expected and what was given.
      NotImplementedError: no implementation that may run it can; says every reason. Raised when
        the call is lowered, which under `jax.jit` means compiled.
    """
    return run(
        _normalise_ragged(
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
            score_mod=score_mod,
            score_mod_args=score_mod_args,
            mask_mod=mask_mod,
            mask_mod_args=mask_mod_args,
            implementation=implementation,
            return_lse=return_lse,
            return_max_logits=return_max_logits,
        ),
        return_residual=False,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )


def _normalise_ragged(
    *, max_seqlen_q: int, max_seqlen_kv: int, needs_keep: bool = False, **arguments: Any
) -> Call:
    max_seq_lens = (
        check_positive_int("max_seqlen_q", max_seqlen_q),
        check_positive_int("max_seqlen_kv", max_seqlen_kv),
    )
    for name, axes in (("query", "[T, N, H]"), ("key", "[S, K, H]"), ("value", "[S, K, V]")):
        if jnp.ndim(arguments[name]) != 3:
            raise ValueError(f"{name}: expected {axes}, got {list(jnp.shape(arguments[name]))}")
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if arguments[name] is None:
            raise ValueError(f"{name}: expected an array of integers, got None")
    return normal_form(
        **arguments,
        max_seq_lens=max_seq_lens,
        needs_keep=needs_keep,
        return_residual=False,
    )


def dropout_mask(*args: Any, **kwargs: Any) -> jax.Array:
    """The dropout mask that a call draws, on the implementation that computes the call.

    For tests, and for computing the same attention elsewhere. The mask is as large as the scores.

    Args:
      *args: those of `dot_product_attention`, or with `cu_seqlens_q` those of
        `ragged_dot_product_attention`; what the call returns is of no account.
      **kwargs: the same, by name.

    Returns:
      bool [B, N, T, S], for packed sequences [N, T, S]: True where a probability is kept, which is
      everywhere if dropout_rate is 0. Unspecified where the query may not attend to the key.

    Raises:
      ValueError: the call is wrong.
      NotImplementedError: the implementation that computes the call does not tell its mask.
    """
    call = _named(args, kwargs).normalised(needs_keep=True)[-1]
    return attention(call.options, call.operands)[-1]


def explain(*args: Any, target: str | None = None, **kwargs: Any) -> Explanation:
    """Which implementation would run a call, and why each of the others would not.

    Args:
      *args: those of `dot_product_attention`, or with `cu_seqlens_q` those of
        `ragged_dot_product_attention`, or with `page_table`, by its name, those of
        `paged_attention`; a `jax.ShapeDtypeStruct` will do for an array.
        A window that is an array is static if its values are known, as outside of `jax.jit`; for
        one that is traced give a struct as a side.
      **kwargs: the same, by name.
      target: the device to explain for, as in `attn_dispatch.target`; it need not be here. None
        means the target in force if there is one, else JAX's default device.

    Returns:
      An `Explanation`: data, whose str() is a table. A call on pages with `cu_seqlens_q` may be
      two; that of the sequences with one query is in `single_queries`. If the call has a mask_mod,
      and the arrays it reads are not traced, it also has the shares of pairs that attend and that
      kernels compute; for long calls these are estimates.

    Raises:
      ValueError: the call is wrong, the target unknown, or None while several are in force.
    """
    if target is not None:
        with target_block(target):
            return explain(*args, **kwargs)
    if len(targets := settings.current().targets) > 1:
        raise ValueError(f"explain: expected target= with {targets} in force, got None")
    named = _named(args, kwargs)
    explained = partial(
        explain_call, device=default_device(), has_lse_grad=named.arguments["return_lse"]
    )
    *singles, spec = _specs(named)
    found = explained(spec)
    if singles:
        found = replace(found, single_queries=explained(singles[0]))
    mask_mod = _known_mask_mod(named.arguments)
    return found if mask_mod is None else replace(found, mask=mask_share(spec, mask_mod))


def spec_of(**kwargs: Any) -> AttentionSpec:
    """The spec of a call with these arguments, structs for arrays as in `explain`.

    Raises:
      TypeError, ValueError: the call is wrong.
    """
    return specs_of(**kwargs)[-1]


def specs_of(**kwargs: Any) -> tuple[AttentionSpec, ...]:
    """The specs of all that computes the call, most often of one; that of `spec_of` last.

    Raises:
      TypeError, ValueError: the call is wrong.
    """
    return _specs(_named((), kwargs))


def _specs(named: _NamedCall) -> tuple[AttentionSpec, ...]:
    arrays = {
        x: y
        for x, y in named.arguments.items()
        if x in ARRAY_ARGUMENTS or x in _READ_BY_MODS or _is_said_by_shape(y)
    }
    first_named: dict[int, str] = {}
    names = {x: first_named.setdefault(id(y), x) for x, y in arrays.items()}
    options: list[AttentionOptions] = []

    def operands(arrays: dict[str, Any]) -> tuple[tuple[jax.Array, ...], ...]:
        # What was one array stays one: same_lengths goes by that.
        calls = named.replaced({x: arrays[y] for x, y in names.items()}).normalised()
        options.extend(call.options for call in calls)
        return tuple(call.operands for call in calls)

    avals = jax.eval_shape(operands, arrays)
    return tuple(LeadingCall.of(x, y).spec for x, y in zip(avals, options, strict=True))


def _known_mask_mod(arguments: dict[str, Any]) -> Mod | None:
    """The call's mask_mod, if what it reads has values."""
    function, read = arguments.get("mask_mod"), arguments.get("mask_mod_args", ())
    if function is None or _is_said_by_shape(read):
        return None
    mod = trace("mask_mod", function, read, "float32")
    return None if any(isinstance(x, Tracer) for x in mod.arrays) else mod


def _is_said_by_shape(argument: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(argument))


@dataclass(frozen=True)
class _NamedCall:
    """The arguments of one of the public calls by name, defaults among them."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def replaced(self, arguments: dict[str, Any]) -> _NamedCall:
        return replace(self, arguments=self.arguments | arguments)

    def normalised(self, *, needs_keep: bool = False) -> tuple[Call, ...]:
        """All that computes it, most often one; that of most queries last."""
        if self.function is paged_attention:
            return normalise_paged(**self.arguments, needs_keep=needs_keep)[0]
        is_ragged = self.function is ragged_dot_product_attention
        normal = _normalise_ragged if is_ragged else normal_form
        return (normal(**self.arguments, needs_keep=needs_keep),)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _NamedCall:
    function: Callable[..., Any] = dot_product_attention
    if "key_pages" in kwargs or "page_table" in kwargs:
        function, kwargs = paged_attention, {"value_pages": None} | kwargs
    elif "cu_seqlens_q" in kwargs:
        function = ragged_dot_product_attention
    check_names(function, kwargs)
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return _NamedCall(function, bound.arguments)
