"""Packed sequences and lengths as the kernels take them: offsets without gaps.

What belongs to no sequence is made sequences of their own, queries without keys and keys without
queries, of which kernels compute nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.flash.call import FlashCall
from attn_dispatch.semantics.live import within_reach
from attn_dispatch.semantics.packing import SequenceRanges, flat_starts


@dataclass(frozen=True)
class Sequences:
    """Of one call: where its sequences are, and which rows count."""

    offsets: tuple[jax.Array, ...]
    """int32 [3 M + 3] of queries and of keys; none of a call that is not packed."""
    live_queries: jax.Array | None
    """bool [1|B, T]: the query attends some key. None: all do."""
    live_keys: jax.Array | None
    """bool [B, S]: the key is of a sequence with queries. None: all are."""

    @staticmethod
    def of(spec: AttentionSpec, call: FlashCall, operands: Mapping[str, jax.Array]) -> Sequences:
        queries, keys = within_reach(spec, operands)
        if not call.is_packed:
            return Sequences((), queries, None)
        ranges = SequenceRanges.of(spec, operands)
        offsets_q = _offsets(
            ranges.starts_q, ranges.lengths_q, spec.seq_len_q + call.gap, first_gap=0
        )
        offsets_kv = _offsets(
            ranges.starts_kv, ranges.lengths_kv, spec.seq_len_kv + call.gap, first_gap=1
        )
        return Sequences((offsets_q, offsets_kv), queries, keys)


def _offsets(starts: jax.Array, lengths: jax.Array, length: int, *, first_gap: int) -> jax.Array:
    """Offsets of sequences [B, M], each followed by two for the gap after it; it is the first or
    the second of those on this side, and the other is empty. So is what stands before all."""
    begins = flat_starts(starts, length)
    ends = begins[:-1] + lengths.reshape(-1)
    if first_gap == 0:
        before = [jnp.zeros_like(begins[:1]), begins[:1], begins[:1]]
        after = [ends, begins[1:], begins[1:]]
    else:
        before = [jnp.zeros_like(begins[:1]), jnp.zeros_like(begins[:1]), begins[:1]]
        after = [ends, ends, begins[1:]]
    return jnp.concatenate([*before, jnp.stack(after, axis=1).reshape(-1)])
