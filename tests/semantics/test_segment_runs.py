"""Runs of segment ids, and the ranges made of them, against those that NumPy finds."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics import segment_runs
from attn_dispatch_tools.verify import reference
from tests.support.interval_calls import Draw
from tests.support.mutants import fails, mutant
from tests.support.option_parts import options_with

BATCH, LARGEST = 2, 4
Arrays = dict[str, np.ndarray]

FACTS: tuple[dict[str, Any], ...] = (
    {},
    {"max_seq_lens": (5, 6)},
    {"has_lengths": True},
    {"is_checked": True},
)


def drawn_ids(rng: Draw, length: int) -> np.ndarray:
    """Ids in order, with padding between and behind them; some out of order or out of range."""
    ids = np.sort(rng.randint(0, LARGEST + 1, (BATCH, length)), axis=1)
    ids = np.where(ids == rng.randint(0, LARGEST + 1), 0, ids)
    if rng.rand() < 0.3:
        ids[:, rng.randint(length)] = rng.randint(-1, LARGEST + 2)
    if rng.rand() < 0.2:
        ids = np.roll(ids, rng.randint(length), axis=1)
    if rng.rand() < 0.1:
        ids = rng.randint(-1, LARGEST + 2, ids.shape)
    return ids.astype(np.int32)


def drawn(rng: Draw, queries: int, keys: int, *, has_lengths: bool) -> Arrays:
    arrays = {
        "query_segment_ids": drawn_ids(rng, queries),
        "key_value_segment_ids": drawn_ids(rng, keys),
    }
    if has_lengths:
        lengths = rng.randint(0, queries + 2, BATCH), rng.randint(0, keys + 1, BATCH)
        names = ("query_seq_lengths", "key_value_seq_lengths")
        arrays |= {x: y.astype(np.int32) for x, y in zip(names, lengths, strict=True)}
    return arrays


def spec_of(arrays: Arrays, queries: int, keys: int, **facts: Any) -> AttentionSpec:
    shapes = (queries, keys, keys)
    given = {
        name: jax.ShapeDtypeStruct((BATCH, length, 1, 1), jnp.float32)
        for name, length in zip(("query", "key", "value"), shapes, strict=True)
    }
    given |= arrays
    options = options_with(given, max_segments=LARGEST, **facts)
    return AttentionSpec.of(list(given.values()), options)


def check(module: ModuleType, lengths: tuple[int, int], facts: dict[str, Any], draws: int) -> None:
    """Compare the runs of drawn ids with those that NumPy finds."""
    others = {x: y for x, y in facts.items() if x != "has_lengths"}
    has_lengths = "has_lengths" in facts
    rng = Draw(sum(lengths))
    spec = spec_of(drawn(rng, *lengths, has_lengths=has_lengths), *lengths, **others)

    @jax.jit
    def found(operands: dict[str, jax.Array]) -> Any:
        runs = module.SegmentRuns.of(spec, operands)
        ranges = [runs.ranges(*x) for x in zip(("query", "key"), lengths, strict=True)]
        return (runs.ids.query, runs.ids.key), runs.ids.invalid, runs.starts, runs.lengths, ranges

    for _ in range(draws):
        arrays = drawn(rng, *lengths, has_lengths=has_lengths)
        with jax.numpy_rank_promotion("raise"):
            made = found({x: jnp.asarray(y) for x, y in arrays.items()})
        ids, invalid, starts, counts, ranges = jax.tree.map(np.asarray, made)
        shaped = {
            name: np.empty((BATCH, length))
            for name, length in zip(("query", "key"), lengths, strict=True)
        }
        for row in range(BATCH):
            expected = reference.ids_and_invalid(spec.options, shaped | arrays, row)
            np.testing.assert_array_equal(invalid[row], expected[0][1])
            for side, (right, _) in enumerate(expected):
                np.testing.assert_array_equal(ids[side][row], right)
                first, count = runs_of(right)
                np.testing.assert_array_equal(counts[side][row], (0, *count))
                is_there = count > 0
                np.testing.assert_array_equal(starts[side][row, 1:][is_there], first[is_there])
                np.testing.assert_array_equal(ranges[side][0][row], first)
                np.testing.assert_array_equal(ranges[side][1][row], count)


def runs_of(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first place and the number of places of the ids from 1 to `LARGEST`, in order. An id
    without places begins where the next one does, or at the end."""
    numbers = range(1, LARGEST + 1)
    count = np.array([(ids == x).sum() for x in numbers])
    first = [min(np.flatnonzero(ids >= x), default=len(ids)) for x in numbers]
    return np.array(first), count


LENGTHS = ((12, 9), (7, 16))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_runs_are_those_that_numpy_finds(lengths, facts):
    check(segment_runs, lengths, facts, 60)


MUTANTS = {
    "runs of padding": ("(x > 0) & (of_place > 0)", "(x > 0)"),
    "the last place of a run left out": ("jnp.where(is_last, place + 1, 0)",
                                         "jnp.where(is_last, place, 0)"),
    "a run that begins late": ("length - place, 0", "length - place - 1, 0"),
    "several runs": ("is_several | ", ""),
    "after a larger id": ("(later < end) | ", ""),
    "after its own places": ("constant_values=length)[:, 1:]", "constant_values=length)[:, :-1]"),
    "runs that are too long": (" | is_long)", ")"),
    "too long by one": ("> longest_run", ">= longest_run"),
    "ids of queries alone": ("queries.is_misplaced | keys.is_misplaced", "queries.is_misplaced"),
    "ids of keys alone": ("queries.is_misplaced | keys.is_misplaced", "keys.is_misplaced"),
    "invalid ids keep their places": ("jnp.where(misplaced, 0, x.end", "jnp.where(False, 0, x.end"),
    "invalid ids are no padding": ("jnp.where(is_out, 0, given.query)", "given.query"),
    "numbers of one kind": ("i * count + of_place", "of_place"),
    "rows not invalid": ("invalid if of_row is None else invalid | of_row", "invalid"),
    "misplaced ids not invalid": ("given.invalid | is_out", "given.invalid"),
    "ids without places": ("jnp.where(is_there, end, start)", "end"),
    "empty ranges out of order": ("lax.cummin(starts, axis=1, reverse=True)", "starts"),
    "starts of invalid ids": ("jnp.where(lengths > 0, self.starts[i][:, 1:], length)",
                              "self.starts[i][:, 1:]"),
}  # fmt: skip
"""Wrong runs: what is wrong, and the text that makes it so."""


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_runs_are_noticed(name):
    wrong = mutant(segment_runs, *MUTANTS[name])
    assert any(fails(partial(check, wrong, x, y, 40)) for x in LENGTHS for y in FACTS)
