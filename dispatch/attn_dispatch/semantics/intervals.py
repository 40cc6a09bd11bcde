"""The mask of a call as intervals: at most two ranges of keys for each query.

Time and memory are O(B · T), also at a million tokens. Masks that are not known to be intervals are
bits instead (mask_bits.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.key_sets import KeySet
from attn_dispatch.programs.program import axes_of
from attn_dispatch.semantics.interval_union import MOST_INTERVALS, Range, any_of, union
from attn_dispatch.semantics.key_spans import KeySpans
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
        ranges, unknown = _ranges(spec, operands)
        rows, has_more = rows_of(ranges, spec.seq_len_q)
        most = len(ranges) if has_more is None else None
        return Intervals(rows, any_of(unknown, has_more), most)


def certain_ranges(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> list[Range]:
    """The ranges of a call whose intervals are certain."""
    ranges, _ = _ranges(spec, operands)
    return ranges


def rows_of(ranges: Sequence[Range], queries: int) -> tuple[jax.Array, jax.Array | None]:
    """The rows [1|B, T, 4] of the union of ranges, and whether some row has more intervals.

    The latter is None where no row can have more.
    """
    if not ranges:
        return jnp.zeros((1, queries, 4), jnp.int32), None
    rows, has_more = union(ranges)
    rows = jnp.broadcast_to(rows, (rows.shape[0], queries, rows.shape[2]))
    return rows, None if has_more is None else has_more.any()


def _ranges(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[list[Range], jax.Array | None]:
    """The ranges of keys, and whether some query sees others; None: that cannot be."""
    spans = KeySpans.of(spec, operands)
    if spec.meaning.mask_mod is None:
        return [spans.within(None, None)], spans.is_scattered
    terms = _terms(spec)
    assert terms is not None
    if not terms:
        return [], None
    ranges, is_no_range = mod_ranges(spec, operands, spans, terms)
    return ranges, any_of(spans.is_scattered, is_no_range)


def has_ranges(spec: AttentionSpec) -> bool:
    """Whether the ranges of keys that all heads see are found without computing any pair."""
    return not spec.has("mask") and (spec.meaning.mask_mod is None or _terms(spec) is not None)


def is_certain(spec: AttentionSpec) -> bool:
    """Whether `rows` are the mask of a call whatever its arrays hold: `unknown` is None.

    The call has lengths that are not symbols, and no pages.
    """
    if spec.has("mask") or (spec.is_packed and spec.most_sequences is None):
        return False
    if spec.meaning.mask_mod is None:
        return True
    terms = _terms(spec)
    is_few = terms is not None and len(terms) <= MOST_INTERVALS
    return is_few and not any(term.equal for term in terms or ())


def _terms(spec: AttentionSpec) -> KeySet | None:
    """The ranges of the call's mask_mod, if they are known and the same for all heads."""
    program = spec.meaning.mask_mod
    assert program is not None
    is_shared = spec.num_heads == 1 or "n" not in axes_of(program)
    return known_set(spec) if is_shared else None
