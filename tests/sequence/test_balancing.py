"""The balance of packed documents over devices, on drawn documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import sequence

TOKENS = 131072


def long_tail(rng: np.random.Generator) -> np.ndarray:
    """The ids of documents with Pareto lengths from 1,000 tokens to the whole sequence, [T]."""
    lengths: list[int] = []
    while (rest := TOKENS - sum(lengths)) > 0:
        lengths.append(min(rest, int((rng.pareto(0.9) + 1) * 1000)))
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


def many_short(rng: np.random.Generator) -> np.ndarray:
    lengths = np.maximum(16, rng.lognormal(7.5, 1.2, TOKENS // 16)).astype(int)
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)[:TOKENS]


def pairs(ids: np.ndarray) -> np.ndarray:
    """The keys up to each query in its document, counted one by one."""
    before: dict[int, int] = {}
    counts = []
    for x in ids.tolist():
        before[x] = before.get(x, 0) + 1
        counts.append(before[x] if x else 0)
    return np.array(counts, float)


@pytest.mark.parametrize("documents", [long_tail, many_short])
@pytest.mark.parametrize(("parts", "most"), [(8, 1.001), (32, 1.02)])
def test_drawn_documents_are_balanced(documents, parts: int, most: float):
    rng = np.random.default_rng(0)
    ratios, zigzag = [], []
    for _ in range(10):
        ids = documents(rng)
        found = sequence.balance(ids, parts)
        work = pairs(ids)
        load = sequence.reorder(work, parts, order=found, axis=0).reshape(parts, -1).sum(axis=1)
        np.testing.assert_allclose(found.load, load)
        ratios.append(load.max() / load.mean())
        assert found.max_over_mean == pytest.approx(ratios[-1])
        load = sequence.reorder(work, parts, axis=0).reshape(parts, -1).sum(axis=1)
        zigzag.append(load.max() / load.mean())
    assert max(ratios) < most and np.mean(ratios) <= 1.008, ratios
    assert np.mean(zigzag) > 1.5  # the order for one document is a bad one for many


def test_one_document_is_balanced():
    assert sequence.balance(np.ones(TOKENS, int), 32).max_over_mean < 1.001


def test_each_device_has_equally_many_chunks_in_ascending_order():
    found = sequence.balance(long_tail(np.random.default_rng(1)), 8)
    chunks = found.chunks.reshape(8, -1)
    assert (np.diff(chunks, axis=1) > 0).all()
    assert sorted(found.chunks) == list(range(TOKENS // 512))
    assert sorted(found.permutation) == list(range(TOKENS)) and found.permutation.dtype == np.int32
    assert found.parts == 8


def test_rows_have_orders_of_their_own_and_padding_costs_nothing():
    ids = np.array([[1] * 8 + [0] * 8, [0] * 8 + [2] * 4 + [1] * 4])
    found = sequence.balance(jnp.asarray(ids), 2, chunk=4)
    np.testing.assert_array_equal(found.load.sum(axis=1), [36, 20])
    np.testing.assert_array_equal(found.load, [[26, 10], [10, 10]])
    assert found.max_over_mean == 26 / 18
    assert sequence.balance(np.zeros(16, int), 2, 4).max_over_mean == 1


def test_ids_in_any_order_are_counted_by_document():
    ids = np.random.default_rng(0).integers(0, 4, 64)
    found = sequence.balance(ids, 4, chunk=4)
    assert found.load.sum() == pairs(ids).sum()


@pytest.mark.parametrize(
    ("ids", "parts", "chunk", "message"),
    [
        (np.ones(96, int), 4, 16, r"expected a length divisible by .* 4 · 16 = 64, got 96"),
        (np.ones(64), 4, 16, r"expected segment ids, integers .*, got float64\[64\]"),
        (np.ones((1, 1, 64), int), 4, 16, r"got int64\[1, 1, 64\]"),
        (np.ones(64, int), 0, 16, r"parts: expected a static positive int, got 0"),
        (np.ones(64, int), 2, 1.5, r"chunk: expected a static positive int, got 1.5"),
    ],
)
def test_wrong_arguments_are_errors(ids, parts, chunk, message: str):
    with pytest.raises(ValueError, match=message):
        sequence.balance(ids, parts, chunk)


def test_traced_ids_are_an_error():
    with pytest.raises(ValueError, match="expected segment ids with values, got a traced array"):
        jax.jit(lambda x: sequence.balance(x, 2, 4).load)(jnp.ones(16, int))
