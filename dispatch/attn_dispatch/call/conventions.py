"""Warnings, once each, of valid calls that mean something else in other libraries."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from attn_dispatch.call.shapes import CallShape
from attn_dispatch.warning import AttentionConventionWarning, Line, warn_once

_MANY_HEADS = 128
"""If there are more kv heads than this, and than keys, that axis probably counts keys."""


def warn_of_conventions(
    given: Mapping[str, jax.Array],
    shape: CallShape,
    *,
    longest: tuple[int, int],
    is_causal: bool,
    has_window: bool,
    is_top_left: bool,
    has_soft_cap: bool,
) -> None:
    """Warn of arguments of a valid call that probably mean something else.

    Args:
      given: the arrays of the call as the caller shaped them, by name.
      shape: the shapes of query and key.
      longest: the largest number of queries and of keys of a sequence.
      is_causal, has_window, is_top_left, has_soft_cap: its options.
    """
    leading, queries, keys = shape.leading, shape.seq_len_q, shape.seq_len_kv
    kv_heads = shape.num_kv_heads
    if not all(isinstance(x, int) for x in (*leading, queries, keys, kv_heads)):
        return  # a symbol of jax.export: its size is not known
    if is_top_left and longest[0] == 1 < longest[1]:
        _warn_of_one_query(given, is_causal=is_causal, has_window=has_window)
    if kv_heads > max(keys, _MANY_HEADS):
        warn(f"key has {keys} keys of {kv_heads} heads: {shape.axes}")
    for name in ("mask", "bias"):
        if name in given and leading[-1:] == (queries,) and queries > 1:
            if given[name].shape == (queries, keys):
                warn(
                    f"{name}: [{queries}, {keys}] is taken for [queries, keys], and the batch is "
                    f"{queries} too. If it is [batch, keys] pass {name}[:, None, None, :]; else "
                    f"pass {name}[None, None]"
                )
        if name in given and leading == (shape.num_heads,) and shape.num_heads > 1:
            if given[name].shape == (shape.num_heads, queries, keys):
                warn(
                    f"{name}: {list(given[name].shape)} is taken for [heads, queries, keys], and "
                    f"the batch is {shape.num_heads} too. If it is [batch, queries, keys] pass "
                    f"{name}[:, None]; else pass {name}[None]"
                )
    if has_soft_cap and "bias" in given:
        warn(
            "logits_soft_cap with bias: the score is capped, then the bias is added. Code that "
            "caps score + bias, as tokamax does, computes another function, which has no argument"
        )


def _warn_of_one_query(
    given: Mapping[str, jax.Array], *, is_causal: bool, has_window: bool
) -> None:
    remedy = 'For a cache pass causal_alignment="bottom_right"'
    if "cu_seqlens_kv" not in given:
        remedy += ", with key_value_seq_lengths where it is not full"
    if is_causal:
        warn(
            "is_causal=True with one query and several keys: top-left causality lets it attend key "
            f"0 alone. {remedy}"
        )
    names = ["local_window_size"] * has_window + ["alibi_slopes"] * ("alibi_slopes" in given)
    if names and not is_causal:
        warn(
            f"{' and '.join(names)} with one query and several keys: top-left alignment counts "
            f"distances from key 0. {remedy}"
        )


def warn_of_ids(name: str, ids: np.ndarray, line: Line | None) -> None:
    """Warn of the call at this line if every row of known ids [..., L] begins with 0."""
    if ids.size and (ids[..., 0] == 0).all():
        warn(
            f"{name}: every row begins with id 0, which is padding and attends nothing. Where ids "
            "count from 0 add 1 to them",
            line,
        )


def warn(message: str, line: Line | None = None) -> None:
    warn_once(message, AttentionConventionWarning, line)
