"""Which segment or sequence every place of a batch row belongs to, and which rows are wrong.

wrong.py says what is wrong. What is, is padding here, so that no implementation reads or computes
anything for it; whatever was given, nothing outside of the arrays is read.

Nothing here has two axes of length: everything is [B, T], [B, S] or [B, M].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.options import AttentionOptions, Meaning, Promises
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.pages import lacks_pages

Arrays = Mapping[str, jax.Array]

SIDES = ("query", "key")

_CU_SEQLENS = {"query": "cu_seqlens_q", "key": "cu_seqlens_kv"}
_SEGMENT_IDS = {"query": "query_segment_ids", "key": "key_value_segment_ids"}
_LENGTHS = {"query": "query_seq_lengths", "key": "key_value_seq_lengths"}

_DECIDING = (
    *_CU_SEQLENS.values(), *_SEGMENT_IDS.values(), *_LENGTHS.values(), "window", "page_table"
)  # fmt: skip
"""The operands that ids depend on."""

_SHAPED = ("query", "key", "key_pages")
"""The operands whose shapes they depend on."""

_FEW = 256
"""Sequences up to which comparing a place with each of them is cheap."""


@dataclass(frozen=True)
class RowIds:
    """The ids of all places, 0 where there is none: in padding, and where something is wrong.

    With max_segments or cu_seqlens the places of an id are one run, ids ascending along the row.
    All places that lengths alone leave have id 1.
    """

    query: jax.Array
    """int32 [B, T]."""
    key: jax.Array
    """int32 [B, S]."""
    wrong: jax.Array | None
    """bool [B, 1|T]; the query's results are NaN. None where nothing can be wrong."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Arrays) -> RowIds:
        """The ids of a call, whatever it has of lengths, segment ids and cu_seqlens."""
        names = [name for name in _DECIDING if spec.has(name)]
        return RowIds(*_row_ids(_deciding(spec), {name: operands[name] for name in names}))

    def of_side(self, side: str) -> jax.Array:
        return self.query if side == "query" else self.key


def _deciding(spec: AttentionSpec) -> AttentionSpec:
    """What ids depend on: the same for a call, its backward pass and what rewrites make of both."""
    shapes = tuple(x for x in spec.operands if x.name in (*_SHAPED, *_DECIDING))
    options = AttentionOptions(
        operands=tuple(x.name for x in shapes),
        meaning=Meaning(
            scale=1.0,
            max_segments=spec.meaning.max_segments,
            max_seq_lens=spec.meaning.max_seq_lens,
            # Pages behind it need not be there.
            window=spec.meaning.window if spec.is_paged else (None, None),
        ),
        promises=Promises(is_checked=spec.promises.is_checked),
    )
    return AttentionSpec(options, shapes)


# Both directions ask for ids, more than once: they are traced for the first of them alone.
@partial(jax.jit, static_argnums=0)
def _row_ids(
    spec: AttentionSpec, operands: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Of a call of which this spec says what ids depend on: `RowIds`, field by field."""
    if spec.has("cu_seqlens_q"):
        return _of_cu_seqlens(spec, operands)
    if spec.has("query_segment_ids"):
        return _of_segment_ids(spec, operands)
    wrong = _wrong_rows(spec, operands)
    query, key = (_is_inside(spec, operands, side, wrong).astype(jnp.int32) for side in SIDES)
    return query, key, wrong


def may_be_wrong(spec: AttentionSpec) -> bool:
    """Whether the call has any operand that ids depend on, and nobody has looked at them yet."""
    return not spec.promises.is_checked and any(map(spec.has, _DECIDING))


def is_packed(spec: AttentionSpec) -> bool:
    """Whether a batch row may hold several sequences."""
    return spec.has("query_segment_ids") or spec.has("cu_seqlens_q")


def most_sequences(spec: AttentionSpec) -> int | None:
    """How many sequences a batch row of a packed call has at most; None where nobody knows."""
    if spec.has("cu_seqlens_q"):
        return spec.shape("cu_seqlens_q")[1] - 1
    return spec.meaning.max_segments


def row_lengths(spec: AttentionSpec, operands: Arrays, side: str) -> jax.Array:
    """The lengths of batch rows on one side, int32 [B]; 0 where one of the row's is wrong."""
    return _right_lengths(spec, operands, side, _wrong_rows(spec, operands))


def _right_lengths(
    spec: AttentionSpec, operands: Arrays, side: str, wrong: jax.Array | None
) -> jax.Array:
    full = full_length(spec, side)
    if not spec.has(_LENGTHS[side]):
        lengths = jnp.full((spec.batch,), full, jnp.int32)
    else:
        lengths = jnp.clip(operands[_LENGTHS[side]], 0, full).astype(jnp.int32)
    return lengths if wrong is None else jnp.where(wrong[:, 0], 0, lengths)


def ascending(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """The same, made to ascend within 0 … length, so that wrong ones reach no other memory."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, length), axis=1)


def cu_seqlens_of(spec: AttentionSpec, operands: Arrays, side: str) -> jax.Array:
    """Those of one side, [B, M + 1], made to ascend within the array."""
    return ascending(operands[_CU_SEQLENS[side]], full_length(spec, side))


def full_length(spec: AttentionSpec, side: str) -> int:
    return spec.seq_len_q if side == "query" else spec.seq_len_kv


def search(rows: jax.Array, wanted: jax.Array, side: str) -> jax.Array:
    """Where each of `wanted` [B, M] would go into the ascending `rows` [B, L]; int32 [B, M]."""
    # One kernel on a GPU, either way; a loop would be some thirty.
    is_small = min(rows.shape[1], wanted.shape[1]) <= _FEW
    method = "compare_all" if is_small else "scan_unrolled"

    def search_row(row: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, values, side=side, method=method)

    return jax.vmap(search_row)(rows, wanted).astype(jnp.int32)


def _wrong_rows(spec: AttentionSpec, operands: Arrays) -> jax.Array | None:
    """bool [B, 1]: the batch row has a length that does not fit its array, no window, or a page
    that is not there. None where nothing of that kind can be."""
    wrong = None
    if spec.promises.is_checked:
        return None
    if spec.has("window"):
        wrong = jnp.broadcast_to((operands["window"] < 0).any(axis=1), (spec.batch,))
    for side in SIDES:
        if spec.has(_LENGTHS[side]):
            lengths = operands[_LENGTHS[side]]
            outside = (lengths < 0) | (lengths > full_length(spec, side))
            wrong = outside if wrong is None else wrong | outside
    if spec.is_paged:
        assert wrong is not None
        wrong = wrong | lacks_pages(spec, operands)
    return None if wrong is None else wrong[:, None]


def _is_inside(
    spec: AttentionSpec, operands: Arrays, side: str, wrong: jax.Array | None
) -> jax.Array:
    """bool [B, L]: the place is before the row's length."""
    lengths = _right_lengths(spec, operands, side, wrong)
    return _iota(full_length(spec, side)) < lengths[:, None]


def _of_segment_ids(
    spec: AttentionSpec, operands: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    given = {side: operands[_SEGMENT_IDS[side]] for side in SIDES}
    of_row = _wrong_rows(spec, operands)
    is_inside = {side: _is_inside(spec, operands, side, of_row) for side in SIDES}
    largest = spec.meaning.max_segments
    ids = {}
    for side, x in given.items():
        is_id = is_inside[side] & (x > 0)
        ids[side] = jnp.where(is_id if largest is None else is_id & (x <= largest), x, 0)
    # An id that is out of range is not among `ids`, and was not 0.
    wrong = is_inside["query"] & (given["query"] != 0) & (ids["query"] == 0)
    if largest is not None:
        misplaced = _misplaced(spec, ids, largest)
        wrong |= _pick(misplaced, ids["query"])
        ids = {side: jnp.where(_pick(misplaced, x), 0, x) for side, x in ids.items()}
    return ids["query"], ids["key"], wrong if of_row is None else wrong | of_row


def _misplaced(spec: AttentionSpec, ids: Mapping[str, jax.Array], largest: int) -> jax.Array:
    """bool [B, largest + 1]: on one side the id's places are not one run in order, or too many."""
    batch = jnp.arange(spec.batch)[:, None]
    misplaced = jnp.zeros((spec.batch, largest + 1), jnp.int32)
    for side, x in ids.items():
        # A place that is in order has index len(misplaced), which nothing is written to.
        found = jnp.where(_out_of_order(x, longest_sequence(spec, side)), x, largest + 1)
        misplaced = misplaced.at[batch, found].max(1, mode="drop")
    return misplaced > 0


def _out_of_order(ids: jax.Array, longest: int) -> jax.Array:
    """bool [B, L]: the place is not of the first run of its id, comes after a larger id, or is the
    run's one too many. Padding, which is 0, is never."""
    places = _iota(ids.shape[1])
    highest = lax.cummax(ids, axis=1)
    is_first = highest > jnp.pad(highest, ((0, 0), (1, 0)))[:, :-1]
    run_start = lax.cummax(jnp.where(is_first, places, 0), axis=1)
    last_other = lax.cummax(jnp.where(ids == highest, -1, places), axis=1)
    is_out = last_other >= run_start
    if longest < ids.shape[1]:
        is_out |= places - run_start >= longest
    return (ids > 0) & is_out


def _of_cu_seqlens(spec: AttentionSpec, operands: Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    right = _cu_seqlens(spec, operands)
    of_row = _wrong_cu_seqlens(spec, operands, right)
    wrong = jnp.pad(_wrong_sequences(spec, right, of_row), ((0, 0), (1, 0)))
    query, key = (_sequence_of(right[side], full_length(spec, side)) for side in SIDES)
    is_wrong = _pick(wrong, query)
    ids = jnp.where(is_wrong, 0, query), jnp.where(_pick(wrong, key), 0, key)
    return *ids, is_wrong | of_row


def wrong_sequences(spec: AttentionSpec, operands: Arrays) -> jax.Array:
    """With cu_seqlens: bool [B, M], whether a sequence is too long, or all of its row is wrong."""
    right = _cu_seqlens(spec, operands)
    return _wrong_sequences(spec, right, _wrong_cu_seqlens(spec, operands, right))


def _cu_seqlens(spec: AttentionSpec, operands: Arrays) -> dict[str, jax.Array]:
    return {side: cu_seqlens_of(spec, operands, side) for side in SIDES}


def _wrong_sequences(spec: AttentionSpec, right: Arrays, of_row: jax.Array) -> jax.Array:
    """bool [B, M], of cu_seqlens made right and of the rows in which they were not."""
    wrong = of_row
    for side in SIDES:
        wrong = wrong | (jnp.diff(right[side], axis=1) > longest_sequence(spec, side))
    return wrong


def _wrong_cu_seqlens(spec: AttentionSpec, operands: Arrays, right: Arrays) -> jax.Array:
    """bool [B, 1]: those of one side do not start at 0, do not ascend, or leave the array."""
    of_row = _wrong_rows(spec, operands)
    wrong = jnp.zeros((spec.batch, 1), bool) if of_row is None else of_row
    for side in SIDES:
        given = operands[_CU_SEQLENS[side]]
        wrong = wrong | (given != right[side]).any(axis=1, keepdims=True) | (given[:, :1] != 0)
    return wrong


def _sequence_of(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """Which sequence each place belongs to, counted from 1, and 0 where none: int32 [B, length]."""
    places = jnp.broadcast_to(_iota(length), (cu_seqlens.shape[0], length))
    index = search(cu_seqlens, places, "right")
    return jnp.where((index > 0) & (index < cu_seqlens.shape[1]), index, 0)


def longest_sequence(spec: AttentionSpec, side: str) -> int:
    """The most places a packed sequence may have."""
    longest, full = spec.meaning.max_seq_lens, full_length(spec, side)
    return full if longest is None else min(longest[side == "key"], full)


def _pick(per_id: jax.Array, ids: jax.Array) -> jax.Array:
    """What belongs to each id [B, L] of [B, M + 1]."""
    return jnp.take_along_axis(per_id, ids, axis=1, mode="promise_in_bounds")


def _iota(length: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (1, length), 1)
