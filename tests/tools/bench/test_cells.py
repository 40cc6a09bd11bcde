"""The benchmark's cells, grids and flops, the order of turns, and time on a device."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from attn_dispatch.core.tuning.timing import orders, turns
from attn_dispatch_tools.bench import device_time
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.grids import GRIDS
from tests.support.bench_cells import DOCUMENTS, WINDOW

# Cells, grids and flops


@pytest.mark.parametrize(
    "cell, flops",
    [
        # 4 · 2 rows · 64² pairs · 3 heads · 8
        (Cell("g", "f", 2, 64, 3, 1, 8, 8, is_causal=False), 4 * 2 * 4096 * 3 * 8),
        (Cell("g", "f", 2, 64, 3, 1, 8, 8), 4 * 2 * 4096 * 3 * 8 / 2),
        # Scores are 12 wide and values 4.
        (Cell("g", "f", 1, 64, 1, 1, 12, 4), 2 * 2048 * (12 + 4)),
        # Only pairs of one document: (25 + 1 + 36) / 2
        (DOCUMENTS, 4 * 31 * 2 * 8),
        # Two rows, each with 11 full windows of 5 keys and a triangle of 5.
        (WINDOW, 4 * 2 * (11 * 5 + 12.5) * 2 * 8),
    ],
)
def test_flops_count_only_the_pairs_that_attend(cell, flops):
    assert cell.flops("forward") == flops
    assert cell.flops("backward") == 2.5 * flops
    assert cell.flops("forward_backward") == 3.5 * flops


def test_a_cell_of_the_dense_grid_has_the_flops_computed_by_hand():
    cell = next(x for x in GRIDS["dense"] if x.name == "d128 causal b2 8k")
    assert cell.forward_flops == 2 * 2 * 8192 * 8192 * 16 * 128  # 0.55 TFLOP
    assert (cell.batch * cell.seq_len, cell.num_heads * cell.head_dim) == (16384, 2048)


def test_cells_of_a_grid_have_distinct_names_and_survive_json():
    for grid, cells in GRIDS.items():
        assert len({x.name for x in cells}) == len(cells), grid
        assert {x.grid for x in cells} == {grid}
        for cell in cells:
            assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


def test_the_grids_have_the_intended_cells():
    assert len(GRIDS["dense"]) == 3 * 2 * 6
    assert {len(x.lengths) for x in GRIDS["packed"]} == {16, 64}
    assert {(x.head_dim, x.head_dim_v) for x in GRIDS["mla"]} == {(192, 128)}
    assert max(x.seq_len for x in GRIDS["long"]) == 131072


# Turns


@pytest.mark.parametrize("count", [2, 3, 4, 5, 10, 11])
def test_each_program_follows_every_other_equally_often(count):
    square = orders(count)
    assert all(sorted(order) == list(range(count)) for order in square)
    followed = Counter(pair for order in square for pair in itertools.pairwise(order))
    assert followed.keys() == set(itertools.permutations(range(count), 2))
    assert len(set(followed.values())) == 1
    places = Counter((place, x) for order in square for place, x in enumerate(order))
    assert len(set(places.values())) == 1


def test_turns_follow_the_orders():
    ran: list[str] = []

    def timed(name):
        return lambda calls: ran.append(name) or 1e-3 * calls

    times = turns({x: timed(x) for x in "abcd"}, rounds=4, seconds=1e-3)
    assert {x: len(y) for x, y in times.items()} == dict.fromkeys("abcd", 4)
    rounds = [tuple(ran[i : i + 4]) for i in range(8, len(ran), 4)]
    assert rounds == [tuple("abcd"[x] for x in order) for order in orders(4)]


def test_one_round_runs_even_if_the_time_is_over():
    times = turns({"a": lambda calls: 1.0}, rounds=9, seconds=1.0, is_over=lambda: True)
    assert len(times["a"]) == 1


def test_device_time_counts_overlapping_spans_once():
    class Line:
        def __init__(self, name, *spans):
            self.name = name
            self.events = [type("Event", (), {"start_ns": a, "end_ns": b}) for a, b in spans]

    streams = [Line("Stream #7", (0, 10), (5, 20), (30, 40)), Line("Stream #8", (35, 50))]
    assert device_time.busy_in([*streams, Line("Steps", (0, 999))]) == (40e-9, "")
    assert device_time.busy_in([Line("Ops", (0, 3)), Line("Steps", (0, 9))]) == (9e-9, "")
    assert device_time.busy_in([]) == (None, "the profile has no kernels")
    assert device_time.busy_seconds(lambda: 1 / 0) == (
        None, "the profiler failed: division by zero"
    )  # fmt: skip
