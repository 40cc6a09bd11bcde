"""`paged_attention`: attention to a cache in pages, and the calls that compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.keywords import PagedOptions
from attn_dispatch.call.layouts import separate_pages
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.normal_form import Call
from attn_dispatch.call.paged_arguments import check_ragged, with_cut_table
from attn_dispatch.call.static_arguments import Implementations, KvLayout, Window
from attn_dispatch.call_steps import No, Results, Two, Yes, normal_form, public_call, run
from attn_dispatch.programs.functions import ScoreMod
from attn_dispatch.semantics.invalid_values import invalid_queries
from attn_dispatch.semantics.query_blocks import QueryBlocks, block_size, fits_query_blocks
from attn_dispatch.semantics.ragged_queries import RaggedQueries
from attn_dispatch.serving.tables import PageTables


@overload
def paged_attention(
    query: ArrayLike, key_pages: ArrayLike, value_pages: ArrayLike | None, page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike, *, return_lse: No = False, **options: Unpack[PagedOptions],
) -> jax.Array: ...  # fmt: skip
@overload
def paged_attention(
    query: ArrayLike, key_pages: ArrayLike, value_pages: ArrayLike | None, page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike, *, return_lse: Yes, **options: Unpack[PagedOptions],
) -> Two: ...  # fmt: skip
@overload
def paged_attention(
    query: ArrayLike, key_pages: ArrayLike, value_pages: ArrayLike | None, page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike, *, return_lse: bool = False, **options: Unpack[PagedOptions],
) -> Results: ...  # fmt: skip
@public_call(lambda arguments: _computed(arguments))
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike | None,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    query_seq_lengths: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = True,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_mod: ScoreMod | None = None,
    score_mod_args: Sequence[object] = (),
    kv_layout: KvLayout = "NHD",
    implementation: Implementations = None,
    return_lse: bool = False,
) -> Results:
    """Attention of new queries to a paged cache of keys and values, for serving.

    One token for each of B sequences, whose own keys are in the cache already:

        out = paged_attention(q, key_pages, value_pages, page_table, key_value_seq_lengths)

    Key s of sequence b is key s % page of page page_table[b, s // page]. The queries are the last
    tokens of their sequence, and their own keys must be in the cache already. So causality and
    windows are aligned bottom right, at the last query and the last key within the lengths. There
    are no gradients.

    Keys and table entries past a sequence's length do not reach anything. A sequence without keys
    has output 0 and lse -inf, and so have queries past a length and tokens of no sequence. Lengths
    and cu_seqlens are checked as in the other calls. A wrong traced one, or a page that does not
    exist, makes the rows of its sequence NaN. Pages past the length need not exist, nor, with
    local_window_size, those that no query of the sequence reaches (`serving.free_behind`).

    Args:
      query: [B, T, N, H], or with cu_seqlens_q [tokens, N, H]; float16, bfloat16, float32, or
        float64 under x64.
      key_pages: [P, page, K, H], in query's dtype.
      value_pages: [P, page, K, V], in query's dtype. Sequences may share pages. None: key_pages is
        a pool [P, 2, page, K, H] of both, keys first.
      page_table: [B, M] integers, from 0 to P - 1 as far as the lengths and the window reach.
      key_value_seq_lengths: [B] integers from 0 to M · page: the number of keys of each sequence,
        those of the new tokens included.
      query_seq_lengths: [B] integers from 0 to T; queries at or past the length are padding.
      cu_seqlens_q: [B + 1] integers, ascending from 0 to at most the number of tokens: sequence b
        has the queries cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1. So one call can hold sequences
        that decode, with one query each, and chunks of prompts.
      max_seqlen_q: static, with cu_seqlens_q: an upper bound on the number of queries of a
        sequence; by default the number of tokens. It matters up to 16, the largest number for which
        kernels for decoding run, and with a score_mod, where queries are padded to it.
      max_seqlen_kv: static: an upper bound on the number of keys of a sequence; by default
        M · page. The table is cut to the pages that so many keys need, and kernels plan for them.
      is_causal: True: each query attends to keys up to its own. False: all queries of a sequence
        attend to all its keys.
      scale: a number, or a floating array [] or [N]; 1/sqrt(H) if None. This and all arguments
        below mean what they mean in `dot_product_attention`.
      local_window_size: (left, right), inclusive, or w for (w, w); None leaves a side open.
      logits_soft_cap: c > 0; scores become c · tanh(score / c).
      alibi_slopes: [N] or [B, N] floating.
      sinks: [N] or [B, N] floating.
      score_mod: (score, b, n, t, s, *score_mod_args) -> score.
      score_mod_args: further arguments of score_mod.
      kv_layout: the order of a page's axes: "NHD" as above, or "HND" for pages with the heads
        first: [P, K, page, H] and [P, K, page, V], or a pool of both [P, 2, K, page, H]. cuDNN
        reads either without copies.
      implementation: None, a name, or a list of names.
      return_lse: also return the natural logarithm of the softmax denominator, sink included:
        [B, T, N], with cu_seqlens_q [tokens, N]; float32 (float64 for float64 inputs).

    Returns:
      The output [B, T, N, V], with cu_seqlens_q [tokens, N, V], in query's dtype; with return_lse
      a tuple of the output and the lse.

    Raises:
      ValueError: the call is wrong; the message says what was expected and what was given.
      NotImplementedError: no implementation that may run the call can; the message gives every
        reason. Raised when the call is lowered, which under `jax.jit` is when it is compiled; and
        at once if the call is differentiated.
    """
    ...


Packed = Callable[[Sequence[jax.Array], float], jax.Array]
"""Packs one result of each call into one array, with a value for rows outside all sequences."""


def paged_calls(arguments: Arguments) -> tuple[tuple[Call, ...], Packed]:
    """The calls that compute `paged_attention`, the longest last, and how to combine results.

    Raises:
      ValueError: if an argument is wrong; the message has what was expected and what was given.
    """
    for name in ("page_table", "key_value_seq_lengths"):
        if name not in arguments.arrays:
            raise ValueError(f"{name}: expected an array of integers, got None")
    if isinstance(arguments.page_table, PageTables):
        raise ValueError("page_table: expected an array [B, M], got PageTables: pass tables.table")
    arguments = with_cut_table(separate_pages(arguments))
    arguments = replace(arguments, causal_alignment="bottom_right")
    if arguments.cu_seqlens_q is None:
        if arguments.max_seqlen_q is not None:
            raise ValueError(
                f"cu_seqlens_q: expected an array with max_seqlen_q={arguments.max_seqlen_q}, "
                "got None"
            )
        return (normal_form(arguments),), lambda results, _: results[0]
    cu_seqlens, longest = check_ragged(arguments, arguments.cu_seqlens_q)
    arguments = replace(arguments, cu_seqlens_q=None, max_seqlen_q=None)
    tokens = jnp.asarray(arguments.query)
    ragged = RaggedQueries.of(cu_seqlens, tokens.shape[0], longest)
    padded = normal_form(
        replace(arguments, query=ragged.padded(tokens), query_seq_lengths=ragged.lengths)
    )
    spec = LeadingCall.of(padded.operands, padded.options).spec
    if not fits_query_blocks(spec):
        return (padded,), lambda results, padding: ragged.packed(results[0], padding)
    blocks = QueryBlocks.of(ragged, block_size(spec))
    invalid = invalid_queries(
        spec, dict(zip(padded.options.operands, padded.operands, strict=True))
    )
    assert invalid is not None
    calls = blocks.calls(arguments, invalid[:, 0], is_causal=spec.band[1] == 0)

    def packed(results: Sequence[jax.Array], padding: float) -> jax.Array:
        single, several = results
        return blocks.packed(single, several, invalid[:, 0], padding)

    return tuple(map(normal_form, calls)), packed


def _computed(arguments: Arguments) -> Results:
    calls, packed = paged_calls(arguments)
    each = (run(call, arguments) for call in calls)
    results = zip(*(x if isinstance(x, tuple) else (x,) for x in each), strict=True)
    out, *lse = map(packed, results, (0, -jnp.inf))
    return (out, *lse) if lse else out
