"""The paged cache: after any steps each sequence has the right keys, and no page is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, paged_attention, serving
from tests.support.present import present
from tests.support.repository import DOCS

SLOTS, MAX_PAGES, PAGES, PAGE, K, H = 4, 6, 15, 4, 2, 8
POOL = np.zeros((PAGES, PAGE, K, H), np.float32)


def tables(num_pages: int = PAGES) -> serving.PageTables:
    return serving.new_tables(SLOTS, MAX_PAGES, num_pages, PAGE)


def check(state: serving.PageTables, lengths: Any = None) -> None:
    """Check the invariants of a state."""
    table, references = np.asarray(state.table), np.asarray(state.references)
    has = np.arange(table.shape[1]) < -(-np.asarray(state.lengths)[:, None] // state.page_size)
    assert (table[has] >= 0).all() and (table[~has] == -1).all()
    counted = np.bincount(table[has], minlength=references.size)
    np.testing.assert_array_equal(counted, references)
    if lengths is not None:
        np.testing.assert_array_equal(state.lengths, lengths)


def read(state: serving.PageTables, pages: jax.Array, slot: int) -> np.ndarray:
    """The keys of a sequence."""
    length = int(state.lengths[slot])
    found = np.asarray(pages)[np.asarray(state.table)[slot]].reshape(-1, *pages.shape[2:])
    return found[:length]


class Cache:
    """A cache, and lists of the keys that its sequences must have."""

    def __init__(self, is_jitted: bool):
        self.state, self.rng = tables(), np.random.default_rng(0)
        self.pages = serving.new_pages(PAGES, PAGE, K, H, jnp.float32) + jnp.nan
        self.expected = [np.zeros((0, K, H)) for _ in range(SLOTS)]
        jit = jax.jit if is_jitted else (lambda f: f)
        self.grow, self.shrink = jit(serving.grow), jit(serving.shrink)
        self.free, self.fork = jit(serving.free), jit(serving.fork)
        self.share, self.write = jit(serving.share_prefix), jit(serving.write)
        self.is_jitted = is_jitted

    def check(self) -> None:
        check(self.state, [len(x) for x in self.expected])
        for slot, expected in enumerate(self.expected):
            np.testing.assert_array_equal(read(self.state, self.pages, slot), expected)

    def has_room_for(self, tokens: np.ndarray) -> bool:
        lengths = np.array([len(x) for x in self.expected])
        pages = lambda x: -(-x // PAGE)  # noqa: E731
        needed = pages(lengths + tokens) - pages(lengths)
        fits = (lengths + tokens <= MAX_PAGES * PAGE).all()
        return bool(fits and needed.sum() <= int(self.state.free_pages))

    def step(self, name: str) -> None:
        source, target = self.rng.permutation(SLOTS)[:2]
        if name == "grow":
            tokens = self.rng.integers(0, 6, SLOTS) * self.rng.integers(0, 2, SLOTS)
            if not self.has_room_for(tokens):
                self.refused(lambda: self.grow(self.state, tokens))
                return
            new = self.rng.standard_normal((SLOTS, 6, K, H)).astype(np.float32)
            self.state = self.grow(self.state, tokens)
            if self.rng.integers(0, 2):
                self.pages = self.write(self.pages, new, self.state, tokens)
            else:
                rows = np.concatenate([x[:n] for x, n in zip(new, tokens, strict=True)])
                rows = np.concatenate([rows, np.full((3, K, H), 7, np.float32)])
                cu = np.concatenate([[0], np.cumsum(tokens)])
                self.pages = self.write(self.pages, rows, self.state, cu_seqlens=cu)
            for slot, number in enumerate(tokens):
                self.expected[slot] = np.concatenate([self.expected[slot], new[slot, :number]])
        elif name == "shrink":
            tokens = self.rng.integers(0, 4, SLOTS)
            lengths = np.maximum([len(x) for x in self.expected] - tokens, 0)
            shared = np.asarray(self.state.references)[np.asarray(self.state.table)] > 1
            ends = shared[np.arange(SLOTS), np.maximum(-(-lengths // PAGE) - 1, 0)]
            if (ends & (lengths % PAGE > 0) & (tokens > 0)).any():
                error = ValueError, "which other sequences have too"
                self.refused(lambda: self.shrink(self.state, tokens), *error)
                return
            self.state = self.shrink(self.state, tokens)
            self.expected = [x[:n] for x, n in zip(self.expected, lengths, strict=True)]
        elif name == "free":
            slots = self.rng.integers(0, 3, SLOTS) == 0
            self.state = self.free(self.state, slots)
            self.expected = [x[:0] if y else x for x, y in zip(self.expected, slots, strict=True)]
        elif name == "share":
            tokens = self.rng.integers(0, 30)
            self.state = self.share(self.state, source, target, tokens)
            length = min(tokens, len(self.expected[source])) // PAGE * PAGE
            self.expected[target] = self.expected[source][:length]
        else:
            length = len(self.expected[source])
            freed = self.free(self.state, np.arange(SLOTS) == target)
            if length % PAGE and not int(freed.free_pages):
                self.refused(lambda: self.fork(self.state, source, target)[0])
                return
            self.state, start, end = self.fork(self.state, source, target)
            self.pages = serving.copy_pages(self.pages, start, end)
            self.expected[target] = self.expected[source]

    def refused(
        self,
        call: Any,
        error: type[Exception] = serving.OutOfPages,
        message: str = "expected at most",
    ) -> None:
        """Check that a call changes nothing, and raises if it is not traced."""
        if not self.is_jitted:
            with pytest.raises(error, match=message):
                call()
            return
        state = call()
        assert state.failed
        for name in ("table", "lengths", "references"):
            np.testing.assert_array_equal(getattr(state, name), getattr(self.state, name))
        with pytest.raises(serving.OutOfPages, match="could not grow, shrink or move"):
            serving.raise_if_failed(state)


@pytest.mark.parametrize("is_jitted", [True, False])
def test_random_steps_keep_the_keys_of_every_sequence(is_jitted):
    cache = Cache(is_jitted)
    steps = ("grow", "grow", "grow", "shrink", "free", "share", "fork")
    for number in range(300 if is_jitted else 60):
        cache.step(steps[cache.rng.integers(len(steps))])
        if number % 5 == 0:
            cache.check()
    cache.state = serving.free(cache.state, np.ones(SLOTS, bool))
    check(cache.state, [0] * SLOTS)
    assert int(cache.state.free_pages) == PAGES


def test_attention_to_written_keys_equals_the_call_on_arrays():
    """The steps are chunks of a prompt, then single tokens."""
    rng = np.random.default_rng(3)
    key, value = (rng.standard_normal((SLOTS, 20, K, H)).astype(np.float32) for _ in range(2))
    query = rng.standard_normal((SLOTS, 20, 2 * K, H)).astype(np.float32)
    expected = dot_product_attention(query, key, value, is_causal=True)
    state = serving.new_tables(SLOTS, 5, 20, PAGE)
    pools = [serving.new_pages(20, PAGE, K, H, jnp.float32) * jnp.nan for _ in range(2)]

    @jax.jit
    def step(state, pools, q, new):
        state = serving.grow(state, jnp.full(SLOTS, q.shape[1]))
        pools = [serving.write(x, y, state) for x, y in zip(pools, new, strict=True)]
        out = paged_attention(q, *pools, state.table, state.lengths)
        return out, state, pools

    at = 0
    for chunk in (7, 6, 1, 1, 2, 3):
        now = slice(at, at + chunk)
        out, state, pools = step(state, pools, query[:, now], (key[:, now], value[:, now]))
        np.testing.assert_allclose(out, expected[:, now], atol=2e-6)
        at += chunk
    serving.raise_if_failed(state)


def test_write_updates_pages_in_place():
    state = serving.grow(tables(), [3, 0, 1, 0])
    pages = serving.new_pages(PAGES, PAGE, K, H, jnp.float32)
    write = jax.jit(serving.write, donate_argnums=0)
    new = jnp.ones((SLOTS, 3, K, H))
    text = present(write.lower(pages, new, state, jnp.array([3, 0, 1, 0])).compile().as_text())
    assert "input_output_alias={ {}: (0, {}, may-alias)" in text
    assert float(write(pages, new, state, jnp.array([3, 0, 1, 0])).sum()) == 4 * K * H


def test_a_prefix_is_shared_and_a_fork_copies_its_last_page():
    state = serving.grow(tables(), [10, 0, 0, 0])
    state = serving.share_prefix(state, 0, 1, 10)
    check(state, [10, 8, 0, 0])
    assert (state.table[0, :2] == state.table[1, :2]).all() and int(state.free_pages) == PAGES - 3
    state, start, end = serving.fork(state, 0, 2)
    check(state, [10, 8, 10, 0])
    assert start == state.table[0, 2] and end == state.table[2, 2] != start
    state = serving.free(state, np.array([True, False, False, False]))
    check(state, [0, 8, 10, 0])
    full, start, end = serving.fork(state, 1, 3)
    assert start == end and int(full.references[state.table[1, 0]]) == 3


def test_a_failure_is_remembered_until_it_is_cleared():
    """Before that no slot grows and nothing is written."""
    grow, write = jax.jit(serving.grow), jax.jit(serving.write)
    begun = grow(tables(2), np.array([4, 0, 0, 0]))
    pages = write(jnp.zeros((2, PAGE, K, H)), jnp.ones((SLOTS, 4, K, H)), begun, [4, 0, 0, 0])
    state = begun
    for tokens in ([5, 0, 0, 0], [1, 0, 0, 0]):
        state = grow(state, np.array(tokens))
        check(state, [4, 0, 0, 0])
        after = write(pages, jnp.full((SLOTS, 5, K, H), 7.0), state, np.array(tokens))
        np.testing.assert_array_equal(after, pages)
    message = "1 of 2 pages are free, and a slot holds 24 keys"
    for call in (lambda: serving.raise_if_failed(state), lambda: serving.grow(state, [1, 0, 0, 0])):
        with pytest.raises(serving.OutOfPages, match=message):
            call()
    state = grow(serving.recovered(state), np.array([1, 0, 0, 0]))
    check(state, [5, 0, 0, 0])
    assert not state.failed


_CHANGES: dict[str, Callable[[serving.PageTables], serving.PageTables]] = {
    "grow": lambda x: serving.grow(x, np.array([1, 0, 0, 0])),
    "shrink": lambda x: serving.shrink(x, np.array([1, 0, 0, 0])),
    "share_prefix": lambda x: serving.share_prefix(x, 0, 2, 4),
    "fork": lambda x: serving.fork(x, 0, 2)[0],
    "free_behind": lambda x: serving.free_behind(x, 1),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_after_a_failure_sequences_keep_their_keys(name):
    """A later change in the same step would remove keys that had not been added."""
    change = _CHANGES[name]
    begun = serving.grow(tables(3), [9, 0, 0, 0])
    failed = jax.jit(serving.grow)(begun, np.array([0, 4, 0, 0]))
    after = jax.jit(change)(failed)
    assert after.failed
    for field in ("table", "lengths", "references"):
        np.testing.assert_array_equal(getattr(after, field), getattr(begun, field))
    with pytest.raises(serving.OutOfPages, match="nothing has changed since but by free"):
        change(failed)
    begun = serving.shrink(serving.recovered(failed), [4, 0, 0, 0])  # this frees a page for a fork
    assert any(
        (x != y).any() for x, y in zip(*map(jax.tree.leaves, (change(begun), begun)), strict=True)
    )


def test_a_freed_prefix_is_not_shared():
    state = serving.free_behind(serving.grow(tables(), [10, 0, 0, 0]), 2)
    with pytest.raises(ValueError, match=r"slot 0 has, got 8: that page was given back"):
        serving.share_prefix(state, 0, 1, 8)
    after = jax.jit(serving.share_prefix)(state, 0, 1, 8)
    assert after.failed and not after.lengths[1]
    forked = serving.fork(state, 0, 1)[0]  # with the same window
    assert forked.lengths.tolist() == [10, 10, 0, 0] and int((forked.table >= 0).sum()) == 2


def test_the_code_of_the_serving_page_runs():
    """The snippets of docs/serving.md run in order and use every public name."""
    page = (DOCS / "serving.md").read_text("utf-8")
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        names.pop("out", None)
        exec(snippet, names)
        assert "out" not in names or bool(jnp.isfinite(names["out"]).all()), snippet
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    public = set(serving.__all__) - {"OutOfPages", "PageTables"}
    assert all(f"serving.{name}(" in code for name in public)
    check(names["tables"])
