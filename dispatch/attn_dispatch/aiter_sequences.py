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
from attn_dispatch.packing import ascending, sequence_of
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
        """The sequences of a call that has lengths, packed sequences or neither."""
        if spec.has("cu_seqlens_q"):
            return _packed(spec, call, operands)
        queries, keys = _iota(spec.seq_len_q), _iota(spec.seq_len_kv)
        if not call.is_group:
            if not _has_dead_rows(call):
                return Sequences((), None, None)
            live = _attends(call, queries, jnp.int32(spec.seq_len_q), jnp.int32(spec.seq_len_kv))
            return Sequences((), live, None)
        length_q = _lengths(operands, "query_seq_lengths", spec.batch, spec.seq_len_q)
        length_k = _lengths(operands, "key_value_seq_lengths", spec.batch, spec.seq_len_kv)
        rows = jnp.arange(spec.batch + 1, dtype=jnp.int32)
        starts = (rows * spec.seq_len_q, rows * spec.seq_len_kv)
        live = (queries < length_q[:, None]) & _attends(
            call, queries, length_q[:, None], length_k[:, None]
        )
        is_read = (keys < length_k[:, None]) & (length_q[:, None] > 0)
        return Sequences((*starts, length_q, length_k), live, is_read)


def _packed(spec: AttentionSpec, call: AiterCall, operands: Mapping[str, jax.Array]) -> Sequences:
    cu_q = ascending(operands["cu_seqlens_q"], spec.seq_len_q)
    cu_k = ascending(operands["cu_seqlens_kv"], spec.seq_len_kv)
    of_query = sequence_of(cu_q, spec.seq_len_q)
    of_key = sequence_of(cu_k, spec.seq_len_kv)
    length_q, length_k = jnp.diff(cu_q, axis=1), jnp.diff(cu_k, axis=1)
    start = _pick(cu_q[:, :-1], of_query)
    position = _iota(spec.seq_len_q) - start
    live = (of_query > 0) & _attends(
        call, position, _pick(length_q, of_query), _pick(length_k, of_query)
    )
    is_read = (of_key > 0) & (_pick(length_q, of_key) > 0)
    if not call.has_gaps:
        return Sequences((cu_q[0], cu_k[0]), live, is_read)
    starts = (_flat_starts(cu_q, spec.seq_len_q), _flat_starts(cu_k, spec.seq_len_kv))
    return Sequences((*starts, length_q.reshape(-1), length_k.reshape(-1)), live, is_read)


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


def _flat_starts(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """[B · M + 1]: where the sequences start once the batch rows lie one after the other."""
    batch = cu_seqlens.shape[0]
    first = length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.append((first + cu_seqlens[:, :-1]).reshape(-1), jnp.int32(batch * length))


def _pick(per_sequence: jax.Array, sequence: jax.Array) -> jax.Array:
    """The value of each place's sequence, [B, L]; anything where it has none."""
    return jnp.take_along_axis(per_sequence, jnp.maximum(sequence - 1, 0), axis=1)


def _lengths(operands: Mapping[str, jax.Array], name: str, batch: int, full: int) -> jax.Array:
    given = operands.get(name)
    if given is None:
        return jnp.full((batch,), full, jnp.int32)
    return jnp.clip(given, 0, full).astype(jnp.int32)


def _iota(length: int) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32)[None, :]
