"""The ids that a call gives, and which batch rows are invalid as a whole.

invalid_values.py defines "invalid".
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.options import AttentionOptions, Meaning, Promises
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.pages import lacks_pages

SIDES = ("query", "key")

_SEGMENT_IDS = {"query": "query_segment_ids", "key": "key_value_segment_ids"}
_LENGTHS = {"query": "query_seq_lengths", "key": "key_value_seq_lengths"}

ID_OPERANDS = (
    "cu_seqlens_q", "cu_seqlens_kv", *_SEGMENT_IDS.values(), *_LENGTHS.values(), "window",
    "page_table",
)  # fmt: skip
"""The operands that ids depend on."""

_SHAPED = ("query", "key", "key_pages")
"""The operands whose shapes ids depend on."""


@dataclass(frozen=True)
class Ids:
    """The ids of all places; 0 in padding."""

    query: jax.Array
    """int32 [B, T]."""
    key: jax.Array
    """int32 [B, S]."""
    invalid: jax.Array | None
    """bool [B, 1|T], True where the query's results are NaN; None if nothing can be invalid."""


def ids_spec(spec: AttentionSpec) -> AttentionSpec:
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


def row_lengths(spec: AttentionSpec, operands: Operands, side: str) -> jax.Array:
    """The lengths of the batch rows on one side, int32 [B]; 0 for invalid rows."""
    return _valid_lengths(spec, operands, side, invalid_rows(spec, operands))


def _valid_lengths(
    spec: AttentionSpec, operands: Operands, side: str, invalid: jax.Array | None
) -> jax.Array:
    full = full_length(spec, side)
    if not spec.has(_LENGTHS[side]):
        lengths = jnp.full((spec.batch,), full, jnp.int32)
    else:
        lengths = jnp.clip(operands[_LENGTHS[side]], 0, full).astype(jnp.int32)
    return lengths if invalid is None else jnp.where(invalid[:, 0], 0, lengths)


def full_length(spec: AttentionSpec, side: str) -> int:
    return spec.seq_len_q if side == "query" else spec.seq_len_kv


def invalid_rows(spec: AttentionSpec, operands: Operands) -> jax.Array | None:
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


def is_inside(
    spec: AttentionSpec, operands: Operands, side: str, invalid: jax.Array | None
) -> jax.Array:
    """bool [B, L]: the place is before the row's length."""
    lengths = _valid_lengths(spec, operands, side, invalid)
    return iota(full_length(spec, side)) < lengths[:, None]


def ids_in_range(spec: AttentionSpec, operands: Operands) -> tuple[Ids, jax.Array | None]:
    """Segment ids as they are given, but 0 where they are out of range, and which batch rows are
    invalid, bool [B, 1].

    Of invalid rows, `Ids.invalid` has those alone whose own id is out of range.
    """
    given = {side: operands[_SEGMENT_IDS[side]] for side in SIDES}
    of_row = invalid_rows(spec, operands)
    inside = {side: is_inside(spec, operands, side, of_row) for side in SIDES}
    largest = spec.meaning.max_segments
    ids: dict[str, jax.Array] = {}
    for side, x in given.items():
        is_id = inside[side] & (x > 0)
        ids[side] = jnp.where(is_id if largest is None else is_id & (x <= largest), x, 0)
    # An id out of range was not 0 and has become 0.
    invalid = inside["query"] & (given["query"] != 0) & (ids["query"] == 0)
    return Ids(ids["query"], ids["key"], invalid), of_row


def longest_run(spec: AttentionSpec, side: str) -> int:
    """The most places that a segment or sequence may have on one side."""
    return spec.longest_sequences[SIDES.index(side)]


def pick(per_id: jax.Array, ids: jax.Array) -> jax.Array:
    """The entry of `per_id` [B, M + 1] for each id [B, L]."""
    return jnp.take_along_axis(per_id, ids, axis=1, mode="promise_in_bounds")


def iota(length: int) -> jax.Array:
    """int32 [1, length]: the places of a row."""
    return lax.broadcasted_iota(jnp.int32, (1, length), 1)
