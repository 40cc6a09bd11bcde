"""Packed sequences and lengths as the kernels take them: offsets that leave no gap.

Rows of no sequence, the gaps, become further sequences: queries without keys, and keys without
queries. Kernels compute nothing for them. If rows past the last sequence are the only gap, and hold
finite numbers, kernels are not told of them (`_end_to_end`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash.call import FlashCall, offsets_count
from attn_dispatch.semantics.invalid_values import invalid_queries
from attn_dispatch.semantics.packing import SequenceRanges, flat_starts
from attn_dispatch.semantics.real_rows import real_rows_by_position

_MOST_COMPARED = 1024
"""Up to so many sequences, comparing all of them with each is cheap."""


@dataclass(frozen=True)
class Sequences:
    """The offsets of a call's sequences, its real rows and its invalid ones."""

    offsets: tuple[jax.Array, ...]
    """int32 [`offsets_count`] for queries and for keys; empty if the call is not packed."""
    real_queries: jax.Array | None
    """bool [1|B, T]: the query attends to some key; None if all do, or in a call of which
    `lies_end_to_end` is true. Offsets say so there."""
    real_keys: jax.Array | None
    """bool [B, S]: the key belongs to a sequence with queries; None likewise."""
    invalid: jax.Array | None
    """bool [B, 1|T]: the query's results are NaN; None if nothing can be invalid, or likewise."""

    @staticmethod
    def of(spec: AttentionSpec, call: FlashCall, operands: Mapping[str, jax.Array]) -> Sequences:
        if call.is_end_to_end:
            return _end_to_end(spec, operands)
        queries, keys = real_rows_by_position(spec, operands)
        invalid = invalid_queries(spec, operands)
        if not call.is_packed:
            return Sequences((), queries, None, invalid)
        ranges = SequenceRanges.of(spec, operands)
        if call.generation.cuts_gaps:
            sides = (
                _Side.of(
                    ranges.starts_q, ranges.lengths_q, spec.seq_len_q + call.gap, call.longest_q
                ),
                _Side.of(
                    ranges.starts_kv, ranges.lengths_kv, spec.seq_len_kv + call.gap, call.longest_kv
                ),
            )
            return Sequences(_in_pieces(*sides, offsets_count(call)), queries, keys, invalid)
        offsets_q = _offsets(
            ranges.starts_q, ranges.lengths_q, spec.seq_len_q + call.gap, first_gap=0
        )
        offsets_kv = _offsets(
            ranges.starts_kv, ranges.lengths_kv, spec.seq_len_kv + call.gap, first_gap=1
        )
        return Sequences((offsets_q, offsets_kv), queries, keys, invalid)


def _end_to_end(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Sequences:
    """The sequences of a call of which `lies_end_to_end` is true, in few kernels of XLA.

    Invalid cu_seqlens make all rows invalid. They become empty sequences at the end of the array,
    so that kernels read and write nothing, and `ends_cleared` sees it by the first offset.
    """
    longest = min(spec.longest_sequences)
    offsets = _or_rows_if_wrong(operands["cu_seqlens_q"][0], spec.seq_len_q, longest)
    return Sequences((offsets, offsets), None, None, None)


def _or_rows_if_wrong(cu_seqlens: jax.Array, rows: int, longest: int) -> jax.Array:
    """cu_seqlens [M + 1]; `rows` everywhere if they do not ascend from 0 to at most that, in steps
    of at most `longest`."""
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    is_wrong = (begins < 0) | (ends > rows) | (ends < begins) | (ends - begins > longest)
    sequence = jnp.arange(len(begins), dtype=jnp.int32)
    is_wrong |= (sequence == 0) & (begins != 0)
    if len(begins) > _MOST_COMPARED:
        return jnp.where(is_wrong.any(), rows, cu_seqlens)
    # The largest end so far is the last one. It is found in one kernel, where `any` takes another.
    is_before = sequence < jnp.arange(len(cu_seqlens), dtype=jnp.int32)[:, None]
    found = jnp.where(is_wrong, rows, jnp.where(is_before, ends, 0))
    return lax.reduce(found, jnp.int32(0), lax.max, (1,))


def _offsets(starts: jax.Array, lengths: jax.Array, length: int, *, first_gap: int) -> jax.Array:
    """Offsets of the sequences [B, M], each followed by two sequences for the gap after it.

    On this side the gap is the first of the two (first_gap=0) or the second (1); the other is
    empty. Two such sequences also come before the first one.
    """
    begins = flat_starts(starts, length)
    ends = begins[:-1] + lengths.reshape(-1)
    if first_gap == 0:
        before = [jnp.zeros_like(begins[:1]), begins[:1], begins[:1]]
        after = [ends, begins[1:], begins[1:]]
    else:
        before = [jnp.zeros_like(begins[:1]), jnp.zeros_like(begins[:1]), begins[:1]]
        after = [ends, ends, begins[1:]]
    return jnp.concatenate([*before, jnp.stack(after, axis=1).reshape(-1)])


@dataclass(frozen=True)
class _Side:
    """Queries or keys as sequences, each with the gap after it. An empty first sequence stands for
    the gap before all others."""

    ends: jax.Array
    """int32 [M + 1]: where the sequences end and their gaps begin."""
    next_begins: jax.Array
    """int32 [M + 1]: where the gaps end."""
    longest: int

    @staticmethod
    def of(starts: jax.Array, lengths: jax.Array, length: int, longest: int) -> _Side:
        begins = flat_starts(starts, length)
        ends = begins[:-1] + lengths.reshape(-1)
        return _Side(jnp.append(jnp.int32(0), ends), begins, longest)

    @property
    def pieces(self) -> jax.Array:
        """The number of pieces of each gap."""
        return -(-(self.next_begins - self.ends) // self.longest)

    def up_to(self, sequence: jax.Array, pieces: jax.Array) -> jax.Array:
        """Where the sequence ends with this many pieces of its gap; with 0, the sequence itself."""
        end = self.ends[sequence] + self.longest * pieces
        return jnp.minimum(end, self.next_begins[sequence])


def _in_pieces(queries: _Side, keys: _Side, count: int) -> tuple[jax.Array, jax.Array]:
    """Offsets of the sequences and of the pieces of their gaps, in one order on both sides.

    Each sequence is followed by the pieces of its queries' gap, without keys, and then by those of
    its keys' gap, without queries.
    """
    of_queries, of_keys = queries.pieces, keys.pieces
    counts = 1 + of_queries + of_keys
    first = jnp.cumsum(counts) - counts
    place = jnp.arange(count - 1, dtype=jnp.int32)
    sequence = jnp.searchsorted(first, place, side="right").astype(jnp.int32) - 1
    after = place - first[sequence]
    pieces_q = jnp.minimum(after, of_queries[sequence])
    pieces_kv = jnp.clip(after - of_queries[sequence], 0, of_keys[sequence])
    found = (queries.up_to(sequence, pieces_q), keys.up_to(sequence, pieces_kv))
    offsets_q, offsets_kv = (jnp.append(jnp.int32(0), x).astype(jnp.int32) for x in found)
    return offsets_q, offsets_kv
