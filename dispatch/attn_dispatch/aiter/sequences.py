"""Packed sequences and lengths as AITER's group mode takes them, and the rows that XLA must fix.

In group mode arrays have no batch axis: batch rows are laid end to end, each as one sequence or
several. Kernels neither read nor write rows of no sequence, and some compute padding rows wrongly:
CK gives NaN dK and dV for a sequence without queries
(github.com/ROCm/rocm-libraries/pull/5790), and ASM gives NaN output for one without keys
(github.com/ROCm/aiter/issues/1442). `Sequences` marks these rows, and XLA sets their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.packing import SequenceRanges, flat_starts
from attn_dispatch.semantics.real_rows import real_rows_by_position
from attn_dispatch.semantics.row_ids import ascending


@dataclass(frozen=True)
class Sequences:
    """The further operands of a call in group mode, and its real rows."""

    operands: tuple[jax.Array, ...]
    """seqstart_q, seqstart_k and, with gaps, lengths of queries and keys; empty outside group mode.

    Lengths are seqlen_q and seqlen_k, or their prefix sums, cu_seqlen_q and cu_seqlen_k.
    """
    real_queries: jax.Array | None
    """bool [1|B, T]: the query attends to some key; None if all do."""
    real_keys: jax.Array | None
    """bool [1|B, S]: the key belongs to a sequence with queries; None if all do."""

    @staticmethod
    def of(
        spec: AttentionSpec,
        call: AiterCall,
        operands: Mapping[str, jax.Array],
        *,
        as_prefix_sums: bool = False,
    ) -> Sequences:
        """The sequences of any call: with lengths, segment ids, cu_seqlens or none of them."""
        queries, keys = real_rows_by_position(spec, operands)
        if not call.is_group:
            return Sequences((), queries, None)
        ranges = SequenceRanges.of(spec, operands)
        starts = _seqstarts(spec, call, operands, ranges)
        if as_prefix_sums:
            starts = (*starts[:2], *map(_prefix_sums, starts[2:]))
        return Sequences(starts, queries, keys)


def _prefix_sums(lengths: jax.Array) -> jax.Array:
    """[n] lengths as [n + 1] sums of those before each, and of all."""
    return jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0))


def _seqstarts(
    spec: AttentionSpec,
    call: AiterCall,
    operands: Mapping[str, jax.Array],
    ranges: SequenceRanges,
) -> tuple[jax.Array, ...]:
    """Where the sequences start and, with gaps, their lengths."""
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
