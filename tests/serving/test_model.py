"""The paged cache compared with a model of it in plain Python, after any sequence of steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_dispatch import serving

SLOTS, MAX_PAGES, PAGES, PAGE = 3, 5, 9, 4
JITTED = {
    name: jax.jit(getattr(serving, name))
    for name in (
        "grow",
        "shrink",
        "free",
        "free_behind",
        "share_prefix",
        "fork",
        "reorder",
        "write",
    )
} | {"copy_pages": jax.jit(serving.copy_pages)}


@dataclass
class Model:
    """The expected state of the cache: the numbers in each slot, and their pages."""

    held: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    pages: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    """The pages of each slot. -1 stands for a page that was freed."""
    failed: bool = False

    @property
    def references(self) -> list[int]:
        count = Counter(x for pages in self.pages for x in pages if x >= 0)
        return [count[page] for page in range(PAGES)]

    @property
    def free(self) -> list[int]:
        return [page for page, number in enumerate(self.references) if not number]

    def grow(self, numbers: list[list[int]]) -> bool:
        """Add these numbers to the slots. Returns False after a failure."""
        if self.failed:
            return False
        wanted = [-(-(len(x) + len(y)) // PAGE) for x, y in zip(self.held, numbers, strict=True)]
        needed = [x - len(y) for x, y in zip(wanted, self.pages, strict=True)]
        if max(wanted) > MAX_PAGES or sum(needed) > len(self.free):
            self.failed = True
            return False
        free = self.free
        for slot in range(SLOTS):
            self.pages[slot] = self.pages[slot] + free[: needed[slot]]
            free = free[needed[slot] :]
            self.held[slot] = self.held[slot] + numbers[slot]
        return True

    def shrink(self, tokens: list[int]) -> None:
        if self.failed:
            return
        lengths = [max(len(x) - y, 0) for x, y in zip(self.held, tokens, strict=True)]
        for slot, length in enumerate(lengths):
            if length % PAGE and length < len(self.held[slot]):
                last = self.pages[slot][length // PAGE]
                if last < 0 or self.references[last] > 1:
                    self.failed = True
                    return
        for slot, length in enumerate(lengths):
            self.cut(slot, length)

    def cut(self, slot: int, length: int) -> None:
        self.held[slot] = self.held[slot][:length]
        self.pages[slot] = self.pages[slot][: -(-length // PAGE)]

    def free_behind(self, windows: list[int], slots: list[bool]) -> None:
        if self.failed:
            return
        for slot in range(SLOTS):
            first = len(self.held[slot]) - windows[slot]
            for i in range(len(self.pages[slot])):
                if slots[slot] and (i + 1) * PAGE <= first:
                    self.pages[slot] = [*self.pages[slot]]
                    self.pages[slot][i] = -1

    def share(self, source: int, target: int, tokens: int) -> None:
        if self.failed:
            return
        whole = min(tokens, len(self.held[source])) // PAGE
        is_freed = whole > 0 and self.pages[source][whole - 1] < 0
        self.failed = source == target or is_freed
        if not self.failed:
            self._share(source, target, whole)

    def _share(self, source: int, target: int, whole: int) -> None:
        self.held[target] = self.held[source][: whole * PAGE]
        self.pages[target] = self.pages[source][:whole]

    def fork(self, source: int, target: int) -> None:
        if self.failed or source == target:
            self.failed = True
            return
        self.reorder([source if x == target else x for x in range(SLOTS)])

    def reorder(self, parents: list[int]) -> None:
        """A last page that is not full stays with its slot, or the first that continues it."""
        if self.failed:
            return
        before = self.held, self.pages
        self.held = [[*self.held[x]] if x >= 0 else [] for x in parents]
        pages = [[*self.pages[x]] if x >= 0 else [] for x in parents]
        copied = [
            slot
            for slot, parent in enumerate(parents)
            if slot != (parent if parents[parent] == parent else parents.index(parent))
            and len(self.held[slot]) % PAGE
        ]
        self.pages = [x[:-1] if slot in copied else x for slot, x in enumerate(pages)]
        free = self.free
        if len(copied) > len(free):
            self.held, self.pages, self.failed = *before, True
            return
        for slot, page in zip(copied, free, strict=False):
            self.pages[slot].append(page)


class CacheAndModel:
    """The cache and its model. Each number is written to the page that the table names."""

    def __init__(self, is_jitted: bool):
        self.plain, self.state = Model(), serving.new_tables(SLOTS, MAX_PAGES, PAGES, PAGE)
        self.pages = serving.new_pages(PAGES, PAGE, 1, 1, jnp.float32) + jnp.nan
        self.calls = JITTED if is_jitted else {x: getattr(serving, x) for x in JITTED}
        self.written = 0

    def __call__(self, name: str, *arguments: Any) -> Any:
        """The result of a call, or None if it raises, which is not recorded as a failure."""
        try:
            return self.calls[name](*arguments)
        except (ValueError, serving.OutOfPages):
            return None

    def do(self, name: str, *given: Any) -> None:  # noqa: C901  a branch for each function
        kept = self.plain.failed
        if name == "grow":
            tokens = np.array(given[0])
            new = self.written + np.arange(SLOTS * 6).reshape(SLOTS, 6)
            self.written += new.size
            self.plain.grow([x[:n].tolist() for x, n in zip(new, tokens, strict=True)])
            found = self("grow", self.state, tokens)
            if found is not None:
                array = jnp.asarray(new, jnp.float32)[..., None, None]
                self.pages = self("write", self.pages, array, found, tokens)
        elif name == "shrink":
            self.plain.shrink(list(given[0]))
            found = self("shrink", self.state, np.array(given[0]))
        elif name == "free":
            for slot in np.flatnonzero(given[0]):
                self.plain.cut(slot, 0)
            found = self("free", self.state, np.array(given[0]))
        elif name == "free_behind":
            windows, chosen = given
            self.plain.free_behind(list(windows), list(chosen))
            found = self("free_behind", self.state, np.array(windows), np.array(chosen))
        elif name == "share_prefix":
            self.plain.share(*given)
            found = self("share_prefix", self.state, *given)
        elif name == "reorder":
            self.plain.reorder(list(given[0]))
            found = self("reorder", self.state, np.array(given[0]))
            if found is not None:
                found, start, end = found
                self.pages = self("copy_pages", self.pages, start, end)
        elif name == "clear":
            self.plain.failed = False
            found = serving.recovered(self.state)
        else:
            self.plain.fork(*given)
            found = self("fork", self.state, *given)
            if found is not None:
                found, start, end = found
                self.pages = self("copy_pages", self.pages, start, end)
        if found is None:
            assert self.plain.failed, (name, given)
            self.plain.failed = kept
        else:
            self.state = found

    def check(self) -> None:
        table = np.full((SLOTS, MAX_PAGES), -1)
        for slot, pages in enumerate(self.plain.pages):
            table[slot, : len(pages)] = pages
        np.testing.assert_array_equal(self.state.table, table)
        np.testing.assert_array_equal(self.state.lengths, [len(x) for x in self.plain.held])
        np.testing.assert_array_equal(self.state.references, self.plain.references)
        assert bool(self.state.failed) == self.plain.failed
        assert int(self.state.free_pages) == len(self.plain.free)
        pages = np.asarray(self.pages)[..., 0, 0]
        for slot, held in enumerate(self.plain.held):
            for i, number in enumerate(held):
                page = self.plain.pages[slot][i // PAGE]
                assert page < 0 or pages[page, i % PAGE] == number, (slot, i)


def for_each_slot(x: Any) -> Any:
    return st.tuples(*[x] * SLOTS)


ONE_SLOT = st.integers(0, SLOTS - 1)
STEPS = st.one_of(
    st.tuples(st.just("grow"), for_each_slot(st.integers(0, 6))),
    st.tuples(st.just("grow"), for_each_slot(st.integers(0, 1))),
    st.tuples(st.just("shrink"), for_each_slot(st.integers(0, 7))),
    st.tuples(st.just("free"), for_each_slot(st.booleans())),
    st.tuples(
        st.just("free_behind"), for_each_slot(st.integers(0, 9)), for_each_slot(st.booleans())
    ),
    st.tuples(st.just("share_prefix"), ONE_SLOT, ONE_SLOT, st.integers(0, 20)),
    st.tuples(st.just("fork"), ONE_SLOT, ONE_SLOT),
    st.tuples(st.just("reorder"), for_each_slot(st.integers(-1, SLOTS - 1))),
    st.just(("clear",)),
)
WITH_CLEARING = st.tuples(st.booleans(), STEPS)
"""A step, and whether a failure is cleared before it; without that little happens."""


@given(st.lists(WITH_CLEARING, min_size=5, max_size=40))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_sequence_of_steps_agrees_with_the_model(steps):
    both = CacheAndModel(is_jitted=True)
    for clears, step in steps:
        if clears:
            both.do("clear")
        both.do(*step)
        both.check()
    both.do("free", (True,) * SLOTS)
    both.check()
    assert both.plain.free == list(range(PAGES))


@given(st.lists(STEPS, min_size=5, max_size=12))
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_sequence_of_eager_steps_agrees_with_the_model(steps):
    both = CacheAndModel(is_jitted=False)
    for step in steps:
        both.do(*step)
        both.check()
    assert not both.state.failed
