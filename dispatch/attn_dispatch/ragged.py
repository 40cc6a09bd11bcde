"""`ragged_dot_product_attention`: its signature and documentation, and the checks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.keywords import RaggedOptions
from attn_dispatch.call.normal_form import Call
from attn_dispatch.call.options import CausalAlignment
from attn_dispatch.call.static_arguments import Implementations, Window, check_positive_int
from attn_dispatch.call_steps import No, Results, Three, Two, Yes, normal_form, public_call, run
from attn_dispatch.programs.functions import MaskMod, ScoreMod


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
@public_call(lambda arguments: run(ragged_call(arguments), arguments))
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
    ...


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
