"""The segment or sequence of every place of a batch row, and which rows are invalid.

invalid_values.py defines "invalid". Invalid rows become padding here, so that no implementation
reads or computes anything for them. Whatever the values, nothing outside the arrays is read.

No array here has two length axes: all are [B, T], [B, S] or [B, M].
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.given_ids import (
    ID_OPERANDS,
    SIDES,
    Ids,
    full_length,
    ids_in_range,
    ids_spec,
    invalid_rows,
    iota,
    is_inside,
    longest_run,
    pick,
)
from attn_dispatch.semantics.segment_runs import SegmentRuns

_CU_SEQLENS = {"query": "cu_seqlens_q", "key": "cu_seqlens_kv"}

_MAX_COMPARED = 256
"""Up to so many sequences, comparing a place with each of them is cheap."""


class RowIds(Ids):
    """The ids of all places; 0 in padding and in invalid rows.

    With max_segments or cu_seqlens the places of an id are one run, and ids ascend along the row.
    With lengths alone, all places before the length have id 1.
    """

    @staticmethod
    def of(spec: AttentionSpec, operands: Operands) -> RowIds:
        """The ids of a call with lengths, segment ids or cu_seqlens."""
        if spec.has("query_segment_ids") and spec.meaning.max_segments is not None:
            found = SegmentRuns.of(spec, operands).ids
            return RowIds(found.query, found.key, found.invalid)
        arrays = {name: operands[name] for name in ID_OPERANDS if spec.has(name)}
        return RowIds(
            *cast("tuple[jax.Array, jax.Array, jax.Array | None]", _row_ids(ids_spec(spec), arrays))
        )


# Both directions need the ids, several times: under jit they are traced once.
@partial(jax.jit, static_argnums=0)
def _row_ids(
    spec: AttentionSpec, operands: Operands
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The fields of `RowIds`, from a spec of `ids_spec`."""
    if spec.has("cu_seqlens_q"):
        return _from_cu_seqlens(spec, operands)
    if spec.has("query_segment_ids"):
        found, of_row = ids_in_range(spec, operands)
        invalid = found.invalid
        assert invalid is not None
        return found.query, found.key, invalid if of_row is None else invalid | of_row
    invalid = invalid_rows(spec, operands)
    query, key = (is_inside(spec, operands, side, invalid).astype(jnp.int32) for side in SIDES)
    return query, key, invalid


def ascending(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """cu_seqlens, made to ascend within 0 … length, so that invalid ones reach no other memory."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, length), axis=1)


def cu_seqlens_of(spec: AttentionSpec, operands: Operands, side: str) -> jax.Array:
    """The cu_seqlens of one side, [B, M + 1]; 0 in batch rows where either side's are invalid."""
    return _cu_seqlens(spec, operands)[0][side]


def search(rows: jax.Array, wanted: jax.Array, side: str) -> jax.Array:
    """jnp.searchsorted row by row: `wanted` [B, M] in the ascending `rows` [B, L]; int32 [B, M]."""
    # Either method is one kernel on a GPU; the default, a loop, would be some thirty.
    is_small = min(rows.shape[1], wanted.shape[1]) <= _MAX_COMPARED
    method = "compare_all" if is_small else "scan_unrolled"

    def search_row(row: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, values, side=side, method=method)

    return jax.vmap(search_row)(rows, wanted).astype(jnp.int32)


def _from_cu_seqlens(
    spec: AttentionSpec, operands: Operands
) -> tuple[jax.Array, jax.Array, jax.Array]:
    valid, of_row = _cu_seqlens(spec, operands)
    invalid = jnp.pad(_invalid_sequences(spec, valid, of_row), ((0, 0), (1, 0)))
    query, key = (_sequence_of(valid[side], full_length(spec, side)) for side in SIDES)
    is_invalid = pick(invalid, query)
    ids = jnp.where(is_invalid, 0, query), jnp.where(pick(invalid, key), 0, key)
    return *ids, is_invalid | of_row


def invalid_sequences(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """bool [B, M], with cu_seqlens: the sequence is too long, or its whole row is invalid."""
    return _invalid_sequences(spec, *_cu_seqlens(spec, operands))


def _invalid_sequences(spec: AttentionSpec, valid: Operands, of_row: jax.Array) -> jax.Array:
    """bool [B, M], from the results of `_cu_seqlens`."""
    invalid = of_row
    for side in SIDES:
        invalid = invalid | (jnp.diff(valid[side], axis=1) > longest_run(spec, side))
    return invalid


def _cu_seqlens(spec: AttentionSpec, operands: Operands) -> tuple[dict[str, jax.Array], jax.Array]:
    """The cu_seqlens by side, 0 in invalid batch rows, and which rows are invalid, bool [B, 1].

    They are where cu_seqlens of one side do not start at 0, do not ascend or exceed the array. As
    all are 0 there, no other memory is reached; XLA computes that in fewer kernels than a maximum
    so far.
    """
    of_row = invalid_rows(spec, operands)
    invalid = jnp.zeros((spec.batch, 1), bool) if of_row is None else of_row
    given = {side: operands[_CU_SEQLENS[side]] for side in SIDES}
    for side, x in given.items():
        descends = (x[:, 1:] < x[:, :-1]).any(axis=1, keepdims=True)
        invalid = invalid | descends | (x[:, :1] != 0) | (x[:, -1:] > full_length(spec, side))
    return {side: jnp.where(invalid, 0, x) for side, x in given.items()}, invalid


def _sequence_of(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """The sequence of each place, counted from 1, and 0 for none: int32 [B, length]."""
    places = jnp.broadcast_to(iota(length), (cu_seqlens.shape[0], length))
    index = search(cu_seqlens, places, "right")
    return jnp.where((index > 0) & (index < cu_seqlens.shape[1]), index, 0)
