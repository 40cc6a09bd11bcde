"""Documents in rows: each occurs once a round, whole, by first fit, in a repeatable order."""

import itertools

import numpy as np
import pytest

from .documents import BEGIN, checksum, standard_library
from .drawn_documents import SHAPE, drawn
from .packing import NO_TARGET, Batch, Rows, Shape, batches, packed, padded


def taken_apart(rows: Rows) -> list[tuple[int, list[int], list[int], list[int]]]:
    """(row, tokens, targets, positions) of each document, by its segment id."""
    found = []
    for row, ids in enumerate(np.asarray(rows.segment_ids)):
        for one in range(1, ids.max() + 1):
            at = np.flatnonzero(ids == one)
            assert len(at) and (np.diff(at) == 1).all()
            arrays = (rows.tokens, rows.targets, rows.positions)
            found.append((row, *(np.asarray(x)[row, at].tolist() for x in arrays)))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layout", [packed, padded])
def test_rows_hold_the_documents_and_nothing_else(layout, seed):
    documents = drawn(seed)
    for batch in itertools.islice(batches(documents, SHAPE, seed), 6):
        rows = layout(batch, SHAPE)
        found = taken_apart(rows)
        assert sorted(x[1] for x in found) == sorted(x.tolist() for x in batch.documents)
        for row, tokens, targets, positions in found:
            assert targets == [*tokens[1:], NO_TARGET]
            assert positions == list(range(len(tokens)))
            assert layout is packed or row < len(batch.documents)
        is_padding = np.asarray(rows.segment_ids) == 0
        assert (np.asarray(rows.targets)[is_padding] == NO_TARGET).all()
        assert (~is_padding).sum() == batch.tokens


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limits", [(5, 9), (1, 4), (2, 2), (5, 40)])
def test_each_document_comes_once_a_round(seed, limits):
    shape = Shape(SHAPE.rows, SHAPE.row_length, *limits)
    documents = drawn(seed)
    seen = [
        int(x[0]) * 16 + int(x[1])
        for batch in itertools.islice(batches(documents, shape, seed), 200)
        for x in batch.documents
    ]
    counts = np.bincount(seen, minlength=len(documents))
    # Documents of a round that has begun have one more; those that wait for a batch have one less.
    assert counts.max() - counts.min() <= 2 and len(seen) > 6 * len(documents)
    assert (counts < counts.max() - 1).sum() <= shape.rows


@pytest.mark.parametrize("seed", range(5))
def test_a_document_is_in_the_first_row_with_room(seed):
    """A document is in the first row that had room for it, within the limits of a batch."""
    for batch in itertools.islice(batches(drawn(seed), SHAPE, seed), 10):
        room, places = [SHAPE.row_length] * SHAPE.rows, [SHAPE.max_segments] * SHAPE.rows
        for document, row in zip(batch.documents, batch.rows, strict=True):
            fits = [i for i in range(SHAPE.rows) if room[i] >= len(document) and places[i]]
            assert row == fits[0]
            room[row] -= len(document)
            places[row] -= 1
        assert len(batch.documents) <= SHAPE.max_documents


def test_documents_that_wait_come_first():
    sizes = (30, 30, 30, 20, 20, 20, 5)
    documents = [np.full(x, i, np.uint8) for i, x in enumerate(sizes)]
    first, second = itertools.islice(batches(documents, SHAPE, 0), 2)
    order = np.random.default_rng(0).permutation(len(sizes)).tolist()
    taken = [int(x[0]) for x in first.documents]
    waiting = [x for x in order if x not in taken]
    assert 1 <= len(waiting) <= SHAPE.rows
    assert [int(x[0]) for x in second.documents][: len(waiting)] == waiting


def test_a_stream_can_be_drawn_again():
    documents = drawn(7)
    once = list(itertools.islice(batches(documents, SHAPE, 3), 9))
    again = list(itertools.islice(batches(documents, SHAPE, 3), 5, 9))
    for one, other in zip(once[5:], again, strict=True):
        np.testing.assert_equal(one.documents, other.documents)
    other = next(batches(documents, SHAPE, 4))
    assert [x.tolist() for x in other.documents] != [x.tolist() for x in once[0].documents]


def test_no_documents_or_too_long_ones_are_refused():
    with pytest.raises(ValueError, match="at most 40 tokens, got 41"):
        next(batches([np.zeros(41, np.uint8)], SHAPE, 0))
    with pytest.raises(ValueError, match="at least one document"):
        next(batches([], SHAPE, 0))


def test_an_empty_batch_is_all_padding():
    assert not np.asarray(packed(Batch([], []), SHAPE).segment_ids).any()


def test_the_standard_library_has_a_long_tail():
    documents = standard_library(4096, files=60)
    lengths = np.array([len(x) for x in documents])
    assert len(lengths) > 300 and lengths.max() <= 4096
    assert lengths.mean() > 1.5 * np.median(lengths)
    assert all(x[0] == BEGIN and (x[1:] != BEGIN).all() for x in documents)
    assert checksum(documents) != checksum(documents[1:])
