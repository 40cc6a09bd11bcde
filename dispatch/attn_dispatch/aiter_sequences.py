"""Packed sequences and lengths as AITER's group mode takes them, and the rows its kernels skip.

Group mode takes arrays without a batch axis: batch rows lie one after the other, each a sequence
of its own, or several. Kernels neither read nor write what belongs to no sequence, and not all of
them get rows right that attend nothing (NaN dK and dV of a sequence without queries in CK,
github.com/ROCm/rocm-libraries/pull/5790; NaN output of one without keys in ASM,
github.com/ROCm/aiter/issues/1442): both are told apart here, for XLA to put the defined values in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.aiter_call import AiterCall
from attn_dispatch.packing import SequenceRanges, ascending
from attn_dispatch.spec import AttentionSpec


@dataclass(frozen=True)
class Sequences:
    """Of one call: what group mode takes further, and which rows count."""

    operands: tuple[jax.Array, ...]
    """seqstart_q, seqstart_k, and with gaps seqlen_q, seqlen_k; none outside group mode."""
    live_queries: jax.Array | None
    """bool [1|B, T]: the query attends some key. None: all do."""
    live_keys: jax.Array | None
    """bool [1|B, S]: the key is of a sequence with queries. None: all are."""

    @staticmethod
    def of(spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array]) -> Sequences:
        """The sequences of a call with lengths, segment ids, packed sequences or none of them."""
        if not call.is_group:
            if not _has_dead_rows(call):
                return Sequences((), None, None)
            length_q, length_k = jnp.int32(spec.seq_len_q), jnp.int32(spec.seq_len_kv)
            return Sequences((), _attends(call, _iota(spec.seq_len_q), length_q, length_k), None)
        ranges = SequenceRanges.of(spec, operands)
        of_query, of_key = ranges.sequence_of_query, ranges.sequence_of_key
        position = _iota(spec.seq_len_q) - _pick(ranges.starts_q, of_query)
        length_q, length_k = (_pick(x, of_query) for x in (ranges.lengths_q, ranges.lengths_kv))
        live = (of_query > 0) & _attends(call, position, length_q, length_k)
        is_read = (of_key > 0) & (_pick(ranges.lengths_q, of_key) > 0)
        return Sequences(_seqstarts(spec, call, operands, ranges), live, is_read)


def _seqstarts(
    spec: AttentionSpec,
    call: AiterCall,
    operands: Mapping[str, jax.Array],
    ranges: SequenceRanges,
) -> tuple[jax.Array, ...]:
    """Where the sequences start, and with gaps how long they are."""
    if not call.has_gaps:
        cu_q = ascending(operands["cu_seqlens_q"], spec.seq_len_q)
        cu_k = ascending(operands["cu_seqlens_kv"], spec.seq_len_kv)
        return cu_q[0], cu_k[0]
    return (
        _flat_starts(ranges.starts_q, spec.seq_len_q),
        _flat_starts(ranges.starts_kv, spec.seq_len_kv),
        ranges.lengths_q.reshape(-1),
        ranges.lengths_kv.reshape(-1),
    )


def _attends(
    call: AiterCall, position: jax.Array, length_q: jax.Array, length_k: jax.Array
) -> jax.Array:
    """Whether the query at this position of its sequence has a key between its window's ends."""
    diagonal = position + (length_k - length_q if call.mask == "bottom_right" else 0)
    first = jnp.maximum(diagonal - call.window_left, 0) if call.window_left >= 0 else 0
    last = length_k - 1
    if call.window_right >= 0:
        last = jnp.minimum(diagonal + call.window_right, last)
    return first <= last


def _has_dead_rows(call: AiterCall) -> bool:
    """Whether some query of unpacked sequences attends nothing, by the ends of its window."""
    t, s = call.seq_len_q, call.seq_len_kv
    offset = s - t if call.mask == "bottom_right" else 0
    starts_late = call.window_right >= 0 and offset + call.window_right < 0
    ends_early = call.window_left >= 0 and t - 1 + offset - call.window_left > s - 1
    return starts_late or ends_early


def _flat_starts(starts: jax.Array, length: int) -> jax.Array:
    """[B · M + 1]: where the sequences start once the batch rows lie one after the other."""
    batch = starts.shape[0]
    first = length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.append((first + starts).reshape(-1), jnp.int32(batch * length))


def _pick(per_sequence: jax.Array, sequence: jax.Array) -> jax.Array:
    """The value of each place's sequence, [B, L]; anything where it has none."""
    return jnp.take_along_axis(per_sequence, jnp.maximum(sequence - 1, 0), axis=1)


def _iota(length: int) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32)[None, :]
