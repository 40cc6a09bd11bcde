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

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.packing import SequenceRanges, flat_starts
from attn_dispatch.semantics.real_rows import real_rows_by_position
from attn_dispatch.semantics.row_ids import ascending


@dataclass(frozen=True)
class Sequences:
    """Of one call: what group mode takes further, and which rows count."""

    operands: tuple[jax.Array, ...]
    """seqstart_q, seqstart_k, and with gaps seqlen_q, seqlen_k; none outside group mode."""
    real_queries: jax.Array | None
    """bool [1|B, T]: the query attends some key. None: all do."""
    real_keys: jax.Array | None
    """bool [1|B, S]: the key is of a sequence with queries. None: all are."""

    @staticmethod
    def of(spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array]) -> Sequences:
        """The sequences of a call with lengths, segment ids, packed sequences or none of them."""
        queries, keys = real_rows_by_position(spec, operands)
        if not call.is_group:
            return Sequences((), queries, None)
        ranges = SequenceRanges.of(spec, operands)
        return Sequences(_seqstarts(spec, call, operands, ranges), queries, keys)


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
        flat_starts(ranges.starts_q, spec.seq_len_q),
        flat_starts(ranges.starts_kv, spec.seq_len_kv),
        ranges.lengths_q.reshape(-1),
        ranges.lengths_kv.reshape(-1),
    )
