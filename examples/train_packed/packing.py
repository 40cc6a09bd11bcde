"""Documents as rows of a batch: several in one row, or one in each.

Both kinds of rows are the same arrays, so the model and the loss do not know which they are given.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

NO_TARGET = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """All int32 [B, T], of NumPy or JAX. Padding has segment id 0 and no target."""

    tokens: Any
    targets: Any
    """The next token of the same document; NO_TARGET for its last one."""
    segment_ids: Any
    """1, 2, 3, … along a row, one for each document."""
    positions: Any
    """Counted from 0 in each document."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The documents of one step, and the row of each when packed."""

    documents: list[np.ndarray]
    rows: list[int]
    """The row of each document."""

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding."""
        return sum(map(len, self.documents))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a batch. Fixed, so that one program is compiled."""

    rows: int
    row_length: int
    """Also the longest document."""
    max_segments: int
    """The most documents in one row."""
    max_documents: int
    """The most in a batch: the rows of a padded one."""


def batches(documents: Sequence[np.ndarray], shape: Shape, seed: int) -> Iterator[Batch]:
    """Endless; in every round each document comes once, in an order drawn from `seed`.

    First fit: a document goes into the first row that has room for it. One that finds none waits
    for the next batch, where it is placed first; once `shape.rows` wait, the batch is complete.
    """
    longest = max((len(x) for x in documents), default=0)
    if longest > shape.row_length:
        raise ValueError(f"documents: expected at most {shape.row_length} tokens, got {longest}")
    order = _endless_order(len(documents), seed)
    waiting: list[int] = []
    while True:
        candidates, waiting = waiting, []  # no more than rows, which are empty: all find one
        room = [shape.row_length] * shape.rows
        places = [shape.max_segments] * shape.rows
        batch = Batch([], [])
        while len(batch.rows) < shape.max_documents and len(waiting) < shape.rows:
            index = candidates.pop(0) if candidates else next(order)
            document = documents[index]
            fits = (i for i in range(shape.rows) if room[i] >= len(document) and places[i])
            row = next(fits, None)
            if row is None:
                waiting.append(index)
                continue
            room[row] -= len(document)
            places[row] -= 1
            batch.documents.append(document)
            batch.rows.append(row)
        yield batch


def _endless_order(count: int, seed: int) -> Iterator[int]:
    if not count:
        raise ValueError("expected at least one document, got none")
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(count).tolist()


def packed(batch: Batch, shape: Shape) -> Rows:
    """[rows, row_length], documents one after the other."""
    return _filled(batch.documents, batch.rows, shape.rows, shape.row_length)


def padded(batch: Batch, shape: Shape) -> Rows:
    """[max_documents, row_length], a document in each row."""
    rows = list(range(len(batch.documents)))
    return _filled(batch.documents, rows, shape.max_documents, shape.row_length)


def _filled(documents: list[np.ndarray], rows: list[int], count: int, length: int) -> Rows:
    tokens, segment_ids, positions = np.zeros((3, count, length), np.int32)
    targets = np.full((count, length), NO_TARGET, np.int32)
    ends, ids = [0] * count, [0] * count
    for document, row in zip(documents, rows, strict=True):
        at = slice(ends[row], ends[row] + len(document))
        ids[row] += 1
        tokens[row, at] = document
        targets[row, at.start : at.stop - 1] = document[1:]
        segment_ids[row, at] = ids[row]
        positions[row, at] = np.arange(len(document))
        ends[row] = at.stop
    return Rows(tokens, targets, segment_ids, positions)
