"""Putting documents into the rows of a batch: several in one row, or one in each.

Both layouts are the same arrays, so that the model and the loss do not depend on the layout.
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
    """The arrays of a batch, int32 [B, T]. Padding has segment id 0 and no target."""

    tokens: Any
    targets: Any
    """The next token of the same document; NO_TARGET for its last one."""
    segment_ids: Any
    """1, 2, 3, … along a row, one for each document."""
    positions: Any
    """Positions, counted from 0 in each document."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The documents of one step."""

    documents: list[np.ndarray]
    rows: list[int]
    """The row of each document in the packed layout."""

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding."""
        return sum(map(len, self.documents))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of all batches, so that only one program is compiled."""

    rows: int
    """The number of rows in the packed layout."""
    row_length: int
    """The length of a row, which is also the greatest length of a document."""
    max_segments: int
    """The most documents in one packed row."""
    max_documents: int
    """The most documents in a batch, and the number of rows in the padded layout."""


def batches(documents: Sequence[np.ndarray], shape: Shape, seed: int) -> Iterator[Batch]:
    """An endless stream of batches. Each document comes once in each round, in a random order.

    A document goes into the first row that has room for it (first fit). If there is none, it waits
    for the next batch, which begins with it. A batch is complete if `shape.rows` documents wait, or
    if it has `shape.max_documents`.
    """
    longest = max((len(x) for x in documents), default=0)
    if longest > shape.row_length:
        raise ValueError(f"documents: expected at most {shape.row_length} tokens, got {longest}")
    order = _endless_order(len(documents), seed)
    waiting: list[int] = []
    while True:
        candidates, waiting = waiting, []  # at most as many as there are empty rows
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
    """The packed layout, [rows, row_length]: several documents in a row."""
    return _filled(batch.documents, batch.rows, shape.rows, shape.row_length)


def padded(batch: Batch, shape: Shape) -> Rows:
    """The padded layout, [max_documents, row_length]: one document in each row."""
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
