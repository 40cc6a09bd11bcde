"""`serving.reorder`: beam search on pages, and the wrong ways to move sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import paged_attention, serving

REQUESTS, BEAMS, VOCAB, PAGE, K, H, STEPS = 2, 3, 11, 4, 1, 8, 200
SLOTS = REQUESTS * BEAMS
MAX_PAGES = -(-STEPS // PAGE)


class Plain:
    """Beam search without pages, in float64: each beam has its own array of keys and values."""

    def __init__(self, weights: np.ndarray, head: np.ndarray):
        self.weights, self.head = weights.astype(np.float64), head.astype(np.float64)
        self.keys, self.values = np.zeros((2, SLOTS, 0, H))
        self.scores = np.zeros((REQUESTS, BEAMS))

    def totals(self, token: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The scores of all continuations, [requests, beams · vocabulary]."""
        q, k, v = self.weights[:, token]
        self.keys = np.concatenate([self.keys, k[:, None]], axis=1)
        self.values = np.concatenate([self.values, v[:, None]], axis=1)
        weights = np.exp(np.einsum("bh,bsh->bs", q, self.keys) / H**0.5)
        out = np.einsum("bs,bsh->bh", weights / weights.sum(1, keepdims=True), self.values)
        logits = out @ self.head
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        totals = self.scores[..., None] + logs.reshape(REQUESTS, BEAMS, VOCAB) + noise
        return totals.reshape(REQUESTS, -1)

    def follow(self, parents: np.ndarray, scores: np.ndarray) -> None:
        self.keys, self.values, self.scores = self.keys[parents], self.values[parents], scores


def test_beam_search_on_pages_is_that_on_arrays():
    """200 steps, with noise in the scores so that beams come from anywhere and end at any time."""
    draw = np.random.default_rng(0)
    weights = draw.normal(size=(3, VOCAB, H)).astype(np.float32)
    head = draw.normal(size=(H, VOCAB)).astype(np.float32)

    @jax.jit
    def step(tables, pools, token, scores, noise):
        q, k, v = jnp.asarray(weights)[:, token][:, :, None, None]
        tables = serving.grow(tables, jnp.ones(SLOTS, jnp.int32))
        pools = [serving.write(x, new, tables) for x, new in zip(pools, (k, v), strict=True)]
        out = paged_attention(q, *pools, tables.table, tables.lengths)[:, 0, 0]
        logs = jax.nn.log_softmax(out @ head).reshape(REQUESTS, BEAMS, VOCAB)
        totals = (scores[..., None] + logs + noise).reshape(REQUESTS, -1)
        scores, best = jax.lax.top_k(totals, BEAMS)
        parents = (best // VOCAB + BEAMS * jnp.arange(REQUESTS)[:, None]).reshape(-1)
        tables, from_page, to_page = serving.reorder(tables, parents)
        pools = [serving.copy_pages(x, from_page, to_page) for x in pools]
        return tables, pools, (best % VOCAB).reshape(-1), scores, parents

    plain = Plain(weights, head)
    tables = serving.new_tables(SLOTS, MAX_PAGES, SLOTS * MAX_PAGES, PAGE)
    pools = [serving.new_pages(SLOTS * MAX_PAGES, PAGE, K, H, jnp.float32) + jnp.nan] * 2
    token, scores = jnp.arange(SLOTS), jnp.zeros((REQUESTS, BEAMS))
    copied = 0
    for _ in range(STEPS):
        noise = draw.gumbel(size=(REQUESTS, BEAMS, VOCAB)).astype(np.float32)
        totals = plain.totals(np.asarray(token), noise)
        tables, pools, token, scores, parents = step(tables, pools, token, scores, noise)
        best = -np.sort(-totals, axis=1)[:, :BEAMS]
        np.testing.assert_allclose(scores, best, rtol=1e-4, atol=1e-4)
        plain.follow(np.asarray(parents), np.asarray(scores, np.float64))
        table, references = np.asarray(tables.table), np.asarray(tables.references)
        expected = np.bincount(table[table >= 0], minlength=len(references))
        np.testing.assert_array_equal(references, expected)
        copied += len(set(np.asarray(parents).tolist())) < SLOTS
    serving.raise_if_failed(tables)
    assert copied > STEPS / 2
    for pages, held in zip(pools, (plain.keys, plain.values), strict=True):
        found = np.asarray(pages)[np.asarray(tables.table)].reshape(SLOTS, -1, H)
        np.testing.assert_allclose(found[:, :STEPS], held, rtol=1e-6)
    # Beams of one request have most of their pages in common.
    assert int(tables.free_pages) > SLOTS * MAX_PAGES * 0.6
    tables = serving.free(tables, np.ones(SLOTS, bool))
    assert int(tables.free_pages) == SLOTS * MAX_PAGES


def begun(num_pages: int = 6) -> serving.PageTables:
    """Slots 0 and 1 have 6 and 3 keys in pages of 4: page 2 and page 1 are not full."""
    tables = serving.new_tables(4, 3, num_pages, 4)
    return serving.grow(tables, np.array([6, 3, 0, 0]))


def test_one_slot_keeps_the_last_page_and_the_others_get_copies():
    tables, from_page, to_page = serving.reorder(begun(), [1, 0, 0, 0])
    assert tables.lengths.tolist() == [3, 6, 6, 6]
    assert tables.table[:, 0].tolist() == [2, 0, 0, 0] and tables.references[0] == 3
    assert tables.table[1:, 1].tolist() == [1, 3, 4]
    assert from_page.tolist() == [2, 1, 1, 1] and to_page.tolist() == [2, 1, 3, 4]


def test_pages_of_a_sequence_that_ends_are_taken_in_the_same_step():
    """There is no free page before."""
    tables, _, to_page = serving.reorder(begun(3), [0, 0, -1, -1])
    assert tables.lengths.tolist() == [6, 6, 0, 0] and tables.free_pages == 0
    assert to_page.tolist()[:2] == [1, 2]


def test_an_empty_slot_copies_nothing_over_a_new_page():
    """The new page is 0, which is what an entry that is not there becomes."""
    tables = serving.free(begun(), np.array([True, False, False, False]))
    tables, from_page, to_page = serving.reorder(tables, [-1, 1, 1, -1])
    assert tables.table[2, 0] == 0
    pages = serving.copy_pages(jnp.arange(6.0), from_page, to_page)
    assert pages.tolist() == [2, 1, 2, 3, 4, 5]


def test_full_pages_are_shared_by_all():
    tables = serving.grow(begun(), np.array([2, 1, 0, 0]))
    tables, from_page, to_page = serving.reorder(tables, [0, 0, 1, 1])
    assert (from_page == to_page).all() and tables.references.tolist() == [2, 2, 2, 0, 0, 0]


def rows_alone(tables: serving.PageTables) -> serving.PageTables:
    parents = jnp.array([0, 0, 1, 3])
    return replace(tables, table=tables.table[parents], lengths=tables.lengths[parents])


def rows_and_references(tables: serving.PageTables) -> serving.PageTables:
    moved = rows_alone(tables)
    return replace(moved, references=jnp.array([2, 2, 1, 0]))


def rows_without_lengths(tables: serving.PageTables) -> serving.PageTables:
    """A permutation, after which references are right."""
    return replace(tables, table=tables.table[jnp.array([3, 1, 2, 0])])


ONE = np.array([1, 1, 0, 0])
CHANGES: dict[str, Callable[[serving.PageTables], serving.PageTables]] = {
    "grow": lambda x: serving.grow(x, ONE),
    "shrink": lambda x: serving.shrink(x, ONE),
    "free": lambda x: serving.free(x, ONE > 0),
    "free_behind": lambda x: serving.free_behind(x, 1),
    "share_prefix": lambda x: serving.share_prefix(x, 0, 1, 4),
    "fork": lambda x: serving.fork(x, 0, 1)[0],
    "reorder": lambda x: serving.reorder(x, ONE)[0],
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_notices_moved_rows(name: str):
    """By references, and by pages that sequences of these lengths do not have."""
    change = CHANGES[name]
    for moved, message in (
        (rows_alone, "got 1 for page 0, which 2 have"),
        (rows_without_lengths, r"2 pages for the 6 keys of slot 0, got the row \[-1, -1, -1\]"),
    ):
        tables = moved(begun(4))
        with pytest.raises(ValueError, match=rf"{message}. To move rows.*serving\.reorder"):
            change(tables)
    after = jax.jit(change)(tables)
    assert after.failed
    np.testing.assert_array_equal(after.table, tables.table)
    np.testing.assert_array_equal(after.references, tables.references)


def test_pages_freed_behind_a_window_are_not_missed():
    tables = serving.free_behind(serving.grow(begun(8), np.array([4, 1, 0, 0])), 0)
    assert tables.table[:2].tolist() == [[-1, -1, 3], [-1, -1, -1]]
    assert serving.grow(tables, ONE).lengths.tolist() == [11, 5, 0, 0]
    swapped = replace(tables, table=tables.table[jnp.array([1, 0, 2, 3])])
    with pytest.raises(ValueError, match=r"3 pages for the 10 keys of slot 0"):
        serving.grow(swapped, ONE)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: serving.grow(rows_and_references(x), ONE),
            ValueError, "got 1 for slot 0, whose last page, 1, other sequences have too",
        ),
        (lambda x: serving.reorder(x, [0, 1, 2, 4])[0], ValueError, r"-1, got \[0, 1, 2, 4\]"),
        (lambda x: serving.reorder(x, [0, 1, 2, -2])[0], ValueError, "parents: expected slots"),
        (lambda x: serving.reorder(x, ONE > 0)[0], ValueError, r"parents: .* \[4\], got bool\[4\]"),
        (lambda x: serving.reorder(x, ONE[:2])[0], ValueError, r"parents: .*\[4\], got int32\[2\]"),
        (
            lambda x: serving.reorder(x, [0, 0, 0, 1])[0],
            serving.OutOfPages, "expected at most 1 new pages, as many as are free of 4, got 2",
        ),
    ],
)  # fmt: skip
def test_wrong_ways_raise_or_fail(
    call: Callable[[serving.PageTables], serving.PageTables], error: type[Exception], message: str
):
    """In traced code nothing changes, and the tables say that they failed."""
    with pytest.raises(error, match=message):
        call(begun(4))
    if "got bool" in message or "got int32" in message:
        return
    after = jax.jit(call)(begun(4))
    assert after.failed
    with pytest.raises((serving.OutOfPages, ValueError), match=r"nothing has changed|for page 0"):
        serving.raise_if_failed(after)
