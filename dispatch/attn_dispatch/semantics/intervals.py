"""The mask of a call as intervals: at most two ranges of keys for each query.

Time and memory are O(B · T), also at a million tokens. Masks that are not known to be intervals are
bits instead (mask_bits.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.program import axes_of
from attn_dispatch.semantics.interval_union import MOST_INTERVALS, any_of, union
from attn_dispatch.semantics.key_spans import KeySpans
from attn_dispatch.semantics.mask_spec import mask_spec
from attn_dispatch.semantics.mod_intervals import known_set, mod_ranges


@dataclass(frozen=True)
class Intervals:
    """The keys that each query sees.

    A query of padding, or of an invalid row (invalid_values.py), sees none.
    """

    rows: jax.Array
    """int32 [1|B, T, 4]: (start, length, start, length), in the normal form of interval_union.py.
    Starts are within 0 … S. A batch axis of 1 stands for all batch rows."""
    unknown: jax.Array | None
    """bool scalar: some query sees keys in more intervals, or in ways that only its pairs tell, so
    the rows are not its mask. None: that cannot be."""
    most: int | None
    """The most intervals that a row can have, 0, 1 or 2; None if only `unknown` tells."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Intervals:
        """The intervals of a call that `has_ranges`."""
        if spec.meaning.mask_mod is None:
            spans = KeySpans.of(spec, operands)
            rows, _ = union([spans.within(None, None)])
            return Intervals(_with_rows(spec, rows), spans.is_scattered, 1)
        terms = known_set(spec)
        assert terms is not None
        spans = KeySpans.of(spec, operands)
        if not terms:
            return Intervals(jnp.zeros((1, spec.seq_len_q, 4), jnp.int32), None, 0)
        ranges, is_no_range = mod_ranges(spec, operands, spans, terms)
        rows, has_more = union(ranges)
        has_more = None if has_more is None else has_more.any()
        unknown = any_of(spans.is_scattered, is_no_range, has_more)
        most = min(len(terms), MOST_INTERVALS) if has_more is None else None
        return Intervals(_with_rows(spec, rows), unknown, most)


def has_ranges(spec: AttentionSpec) -> bool:
    """Whether the ranges of keys that all heads see are found without computing any pair."""
    if spec.has("mask"):
        return False
    program = spec.meaning.mask_mod
    if program is None:
        return True
    is_shared = spec.num_heads == 1 or "n" not in axes_of(program)
    return is_shared and known_set(spec) is not None


def is_certain(spec: AttentionSpec) -> bool:
    """Whether `rows` are the mask of a call whatever its arrays hold: `unknown` is None.

    The call has lengths that are not symbols, and no pages.
    """
    if not has_ranges(spec):
        return False
    if spec.meaning.mask_mod is None:
        return not spec.is_packed or spec.most_sequences is not None
    return _is_certain(mask_spec(spec))


@lru_cache(maxsize=1024)
def _is_certain(spec: AttentionSpec) -> bool:
    arrays = {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in spec.operands}

    def unknown(operands: Mapping[str, jax.Array]) -> jax.Array | None:
        return Intervals.of(spec, operands).unknown

    return jax.eval_shape(unknown, arrays) is None


def _with_rows(spec: AttentionSpec, rows: jax.Array) -> jax.Array:
    """[1|B, 1|T, 4] as [1|B, T, 4]."""
    return jnp.broadcast_to(rows, (rows.shape[0], spec.seq_len_q, rows.shape[2]))
