"""The segment or sequence of every place of a batch row, and which rows are invalid.

invalid_values.py defines "invalid". Invalid rows become padding here, so that no implementation
reads or computes anything for them. Whatever the values, nothing outside the arrays is read.

No array here has two length axes: all are [B, T], [B, S] or [B, M].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.options import AttentionOptions, Meaning, Promises
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.pages import lacks_pages

SIDES = ("query", "key")

_CU_SEQLENS = {"query": "cu_seqlens_q", "key": "cu_seqlens_kv"}
_SEGMENT_IDS = {"query": "query_segment_ids", "key": "key_value_segment_ids"}
_LENGTHS = {"query": "query_seq_lengths", "key": "key_value_seq_lengths"}

ID_OPERANDS = (
    *_CU_SEQLENS.values(), *_SEGMENT_IDS.values(), *_LENGTHS.values(), "window", "page_table"
)  # fmt: skip
"""The operands that ids depend on."""

_SHAPED = ("query", "key", "key_pages")
"""The operands whose shapes ids depend on."""

_MAX_COMPARED = 256
"""Up to so many sequences, comparing a place with each of them is cheap."""


@dataclass(frozen=True)
class RowIds:
    """The ids of all places; 0 in padding and in invalid rows.

    With max_segments or cu_seqlens the places of an id are one run, and ids ascend along the row.
    With lengths alone, all places before the length have id 1.
    """

    query: jax.Array
    """int32 [B, T]."""
    key: jax.Array
    """int32 [B, S]."""
    invalid: jax.Array | None
    """bool [B, 1|T], True where the query's results are NaN; None if nothing can be invalid."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Operands) -> RowIds:
        """The ids of a call with lengths, segment ids or cu_seqlens."""
        names = [name for name in ID_OPERANDS if spec.has(name)]
        arrays = {name: operands[name] for name in names}
        found = cast(
            "tuple[jax.Array, jax.Array, jax.Array | None]", _row_ids(_ids_spec(spec), arrays)
        )
        return RowIds(*found)

    def of_side(self, side: str) -> jax.Array:
        return self.query if side == "query" else self.key


def _ids_spec(spec: AttentionSpec) -> AttentionSpec:
    """The part of a spec that ids depend on: the same in both directions and in rewritten calls."""
    shapes = tuple(x for x in spec.operands if x.name in (*_SHAPED, *ID_OPERANDS))
    options = AttentionOptions(
        operands=tuple(x.name for x in shapes),
        meaning=Meaning(
            scale=1.0,
            max_segments=spec.meaning.max_segments,
            max_seq_lens=spec.meaning.max_seq_lens,
            # Pages behind the window may be missing.
            window=spec.meaning.window if spec.is_paged else (None, None),
        ),
        promises=Promises(is_checked=spec.promises.is_checked),
    )
    return AttentionSpec(options, shapes)


# Both directions need the ids, several times: under jit they are traced once.
@partial(jax.jit, static_argnums=0)
def _row_ids(
    spec: AttentionSpec, operands: Operands
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The fields of `RowIds`, from a spec of `_ids_spec`."""
    if spec.has("cu_seqlens_q"):
        return _from_cu_seqlens(spec, operands)
    if spec.has("query_segment_ids"):
        return _from_segment_ids(spec, operands)
    invalid = _invalid_rows(spec, operands)
    query, key = (_is_inside(spec, operands, side, invalid).astype(jnp.int32) for side in SIDES)
    return query, key, invalid


def row_lengths(spec: AttentionSpec, operands: Operands, side: str) -> jax.Array:
    """The lengths of the batch rows on one side, int32 [B]; 0 for invalid rows."""
    return _valid_lengths(spec, operands, side, _invalid_rows(spec, operands))


def _valid_lengths(
    spec: AttentionSpec, operands: Operands, side: str, invalid: jax.Array | None
) -> jax.Array:
    full = full_length(spec, side)
    if not spec.has(_LENGTHS[side]):
        lengths = jnp.full((spec.batch,), full, jnp.int32)
    else:
        lengths = jnp.clip(operands[_LENGTHS[side]], 0, full).astype(jnp.int32)
    return lengths if invalid is None else jnp.where(invalid[:, 0], 0, lengths)


def ascending(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """cu_seqlens, made to ascend within 0 … length, so that invalid ones reach no other memory."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, length), axis=1)


def cu_seqlens_of(spec: AttentionSpec, operands: Operands, side: str) -> jax.Array:
    """The cu_seqlens of one side, [B, M + 1], made to ascend within the array."""
    return ascending(operands[_CU_SEQLENS[side]], full_length(spec, side))


def full_length(spec: AttentionSpec, side: str) -> int:
    return spec.seq_len_q if side == "query" else spec.seq_len_kv


def search(rows: jax.Array, wanted: jax.Array, side: str) -> jax.Array:
    """jnp.searchsorted row by row: `wanted` [B, M] in the ascending `rows` [B, L]; int32 [B, M]."""
    # Either method is one kernel on a GPU; the default, a loop, would be some thirty.
    is_small = min(rows.shape[1], wanted.shape[1]) <= _MAX_COMPARED
    method = "compare_all" if is_small else "scan_unrolled"

    def search_row(row: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, values, side=side, method=method)

    return jax.vmap(search_row)(rows, wanted).astype(jnp.int32)


def _invalid_rows(spec: AttentionSpec, operands: Operands) -> jax.Array | None:
    """bool [B, 1]: the batch row has a length outside its array, a negative side of the window, or
    a missing page. None if the call has none of these operands."""
    invalid = None
    if spec.promises.is_checked:
        return None
    if spec.has("window"):
        invalid = jnp.broadcast_to((operands["window"] < 0).any(axis=1), (spec.batch,))
    for side in SIDES:
        if spec.has(_LENGTHS[side]):
            lengths = operands[_LENGTHS[side]]
            outside = (lengths < 0) | (lengths > full_length(spec, side))
            invalid = outside if invalid is None else invalid | outside
    if spec.is_paged:
        assert invalid is not None
        invalid = invalid | lacks_pages(spec, operands)
    return None if invalid is None else invalid[:, None]


def _is_inside(
    spec: AttentionSpec, operands: Operands, side: str, invalid: jax.Array | None
) -> jax.Array:
    """bool [B, L]: the place is before the row's length."""
    lengths = _valid_lengths(spec, operands, side, invalid)
    return _iota(full_length(spec, side)) < lengths[:, None]


def ids_in_range(spec: AttentionSpec, operands: Operands) -> tuple[RowIds, jax.Array | None]:
    """Segment ids as they are given, but 0 where they are out of range, and which batch rows are
    invalid, bool [B, 1].

    Of invalid rows, `RowIds.invalid` has those alone whose own id is out of range.
    """
    given = {side: operands[_SEGMENT_IDS[side]] for side in SIDES}
    of_row = _invalid_rows(spec, operands)
    is_inside = {side: _is_inside(spec, operands, side, of_row) for side in SIDES}
    largest = spec.meaning.max_segments
    ids: dict[str, jax.Array] = {}
    for side, x in given.items():
        is_id = is_inside[side] & (x > 0)
        ids[side] = jnp.where(is_id if largest is None else is_id & (x <= largest), x, 0)
    # An id out of range was not 0 and has become 0.
    invalid = is_inside["query"] & (given["query"] != 0) & (ids["query"] == 0)
    return RowIds(ids["query"], ids["key"], invalid), of_row


def _from_segment_ids(
    spec: AttentionSpec, operands: Operands
) -> tuple[jax.Array, jax.Array, jax.Array]:
    found, of_row = ids_in_range(spec, operands)
    ids, invalid = {side: found.of_side(side) for side in SIDES}, found.invalid
    assert invalid is not None
    largest = spec.meaning.max_segments
    if largest is not None:
        misplaced = _misplaced(spec, ids, largest)
        invalid |= pick(misplaced, ids["query"])
        ids = {side: jnp.where(pick(misplaced, x), 0, x) for side, x in ids.items()}
    return ids["query"], ids["key"], invalid if of_row is None else invalid | of_row


def _misplaced(spec: AttentionSpec, ids: Mapping[str, jax.Array], largest: int) -> jax.Array:
    """bool [B, largest + 1]: on some side the id has several runs, or one misplaced or too long."""
    batch = jnp.arange(spec.batch)[:, None]
    misplaced = jnp.zeros((spec.batch, largest + 1), jnp.int32)
    for side, x in ids.items():
        # A place in order gets the index largest + 1, which mode="drop" ignores.
        found = jnp.where(_out_of_order(x, longest_run(spec, side)), x, largest + 1)
        misplaced = misplaced.at[batch, found].max(1, mode="drop")
    return misplaced > 0


def _out_of_order(ids: jax.Array, longest: int) -> jax.Array:
    """bool [B, L]: the place is not in the first run of its id, follows a larger id, or makes its
    run longer than `longest`. Padding, with id 0, never is."""
    places = _iota(ids.shape[1])
    highest = lax.cummax(ids, axis=1)
    is_first = highest > jnp.pad(highest, ((0, 0), (1, 0)))[:, :-1]
    run_start = lax.cummax(jnp.where(is_first, places, 0), axis=1)
    last_other = lax.cummax(jnp.where(ids == highest, -1, places), axis=1)
    is_out = last_other >= run_start
    if longest < ids.shape[1]:
        is_out |= places - run_start >= longest
    return (ids > 0) & is_out


def _from_cu_seqlens(
    spec: AttentionSpec, operands: Operands
) -> tuple[jax.Array, jax.Array, jax.Array]:
    repaired = _cu_seqlens(spec, operands)
    of_row = _invalid_cu_seqlens(spec, operands, repaired)
    invalid = jnp.pad(_invalid_sequences(spec, repaired, of_row), ((0, 0), (1, 0)))
    query, key = (_sequence_of(repaired[side], full_length(spec, side)) for side in SIDES)
    is_invalid = pick(invalid, query)
    ids = jnp.where(is_invalid, 0, query), jnp.where(pick(invalid, key), 0, key)
    return *ids, is_invalid | of_row


def invalid_sequences(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """bool [B, M], with cu_seqlens: the sequence is too long, or its whole row is invalid."""
    repaired = _cu_seqlens(spec, operands)
    return _invalid_sequences(spec, repaired, _invalid_cu_seqlens(spec, operands, repaired))


def _cu_seqlens(spec: AttentionSpec, operands: Operands) -> dict[str, jax.Array]:
    return {side: cu_seqlens_of(spec, operands, side) for side in SIDES}


def _invalid_sequences(spec: AttentionSpec, repaired: Operands, of_row: jax.Array) -> jax.Array:
    """bool [B, M], from repaired cu_seqlens and the rows [B, 1] in which they were invalid."""
    invalid = of_row
    for side in SIDES:
        invalid = invalid | (jnp.diff(repaired[side], axis=1) > longest_run(spec, side))
    return invalid


def _invalid_cu_seqlens(spec: AttentionSpec, operands: Operands, repaired: Operands) -> jax.Array:
    """bool [B, 1]: cu_seqlens of one side do not start at 0, do not ascend or exceed the array."""
    of_row = _invalid_rows(spec, operands)
    invalid = jnp.zeros((spec.batch, 1), bool) if of_row is None else of_row
    for side in SIDES:
        given = operands[_CU_SEQLENS[side]]
        invalid = (
            invalid | (given != repaired[side]).any(axis=1, keepdims=True) | (given[:, :1] != 0)
        )
    return invalid


def _sequence_of(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """The sequence of each place, counted from 1, and 0 for none: int32 [B, length]."""
    places = jnp.broadcast_to(_iota(length), (cu_seqlens.shape[0], length))
    index = search(cu_seqlens, places, "right")
    return jnp.where((index > 0) & (index < cu_seqlens.shape[1]), index, 0)


def longest_run(spec: AttentionSpec, side: str) -> int:
    """The most places that a segment or sequence may have on one side."""
    return spec.longest_sequences[SIDES.index(side)]


def pick(per_id: jax.Array, ids: jax.Array) -> jax.Array:
    """The entry of `per_id` [B, M + 1] for each id [B, L]."""
    return jnp.take_along_axis(per_id, ids, axis=1, mode="promise_in_bounds")


def _iota(length: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (1, length), 1)
