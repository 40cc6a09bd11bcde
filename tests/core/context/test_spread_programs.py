"""What devices send and keep, and what is refused, in calls whose sequences are spread."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.context.spread_programs import OPTIONS, H, K, N, T
from tests.support.module_report import report_of

DEVICES = 8
ROWS = T // DEVICES
KEYS_OF_A_DEVICE = ROWS * K * H
STEPS = DEVICES - 1


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.core.context.spread_programs")


def exchanged(report, program: str, passes: str) -> dict[str, list[int]]:
    """The sizes of what collectives give a device, by collective."""
    return report["programs"][program]["exchanged"][passes]


def programs(*names: str) -> list[str]:
    found = (f"{x}|{order}" for x in OPTIONS for order in ("jit", "contiguous", "zigzag"))
    return [x for x in found if x.split("|")[0] in names and x != "halo|zigzag"]


@pytest.mark.parametrize("program", programs("ring", "ring, full", "halo"))
@pytest.mark.parametrize("passes", ["forward", "both"])
def test_no_device_receives_more_than_the_rows_of_another(report, program, passes):
    found = exchanged(report, program, passes)
    assert list(found) == ["collective-permute"]
    assert max(found["collective-permute"]) <= ROWS * N * H


@pytest.mark.parametrize("program", ["ring|zigzag", *programs("ring, full")])
def test_ring_sends_keys_and_values_together_once_in_each_step(report, program):
    forward, both = (exchanged(report, program, x) for x in ("forward", "both"))
    assert forward["collective-permute"] == [2 * KEYS_OF_A_DEVICE] * STEPS
    # Before JAX 0.12 the compiler for CPUs finds that the backward pass needs the same keys; that
    # for GPUs is kept from it (sent_by_gpus.py). Their gradients follow them.
    receives_anew = len(both["collective-permute"]) > 2 * STEPS
    assert both["collective-permute"] == [2 * KEYS_OF_A_DEVICE] * ((2 + receives_anew) * STEPS)


@pytest.mark.parametrize("program", programs("ring", "gather"))
def test_contiguous_rows_are_put_in_zigzag_order_in_two_halves(report, program):
    permutes = len(exchanged(report, program, "forward").get("collective-permute", ()))
    steps = STEPS if "ring" in program else 0
    arrays = 4 if "ring" in program else 2  # query and out, and keys and values of a ring
    assert permutes - steps == (0 if "zigzag" in program else 2 * arrays)


@pytest.mark.parametrize("program", programs("halo"))
def test_halo_sends_keys_and_values_together_once_and_their_gradients_back(report, program):
    forward, both = (exchanged(report, program, x) for x in ("forward", "both"))
    assert forward["collective-permute"] == [2 * KEYS_OF_A_DEVICE]
    assert both["collective-permute"] == [2 * KEYS_OF_A_DEVICE] * 2


@pytest.mark.parametrize("program", programs("gather"))
def test_gather_gathers_keys_and_values_alone_and_scatters_their_gradients(report, program):
    found = exchanged(report, program, "both")
    assert found["all-gather"] == [DEVICES * KEYS_OF_A_DEVICE] * 2
    assert found["reduce-scatter"] == [KEYS_OF_A_DEVICE] * 2


@pytest.mark.parametrize("program", programs("ring", "ring, full", "gather", "halo"))
def test_a_device_keeps_its_own_rows_for_the_backward_pass(report, program):
    query_and_out, key_and_value, lse = 2 * ROWS * N * H, 2 * KEYS_OF_A_DEVICE, ROWS * N
    assert report["programs"][program]["kept"] == 4 * (query_and_out + key_and_value + lse)


WRONG = {
    "outside": "ValueError: context_axis: expected a call inside jax.shard_map, got ('context',) "
    "outside one; either make the call in a jax.shard_map over this axis, or leave context_axis "
    "out and shard query, key and value along the sequence",
    "other axis": "which are ('context',), got ('tensor',)",
    "misspelt axis": "got ('contexts',); did you mean 'context'?",
    "twice": "expected different axes of the surrounding jax.shard_map, which are ('context',), "
    "got ('context', 'context')",
    "no axes": "which are ('context',), got ()",
    "order": "ValueError: sequence_order: expected one of ('contiguous', 'zigzag', "
    "'documents'), got 'stripes'",
    "misspelt order": "got 'zig-zag'; did you mean 'zigzag'?",
    "order without axis": "ValueError: sequence_order: expected context_axis with 'zigzag', got "
    "None; under jax.jit alone, sequences stay in order: leave sequence_order out",
    "odd rows": "ValueError: query: expected an even length on each device for zigzag order, got 3",
    "documents without ids": "ValueError: sequence_order: expected query_segment_ids with "
    "'documents', got None",
    "unknown strategy": "ValueError: context_parallel: expected one of ",
    "Ulysses": "got 'ulysses'; did you mean 'heads'?",
}
UNSUPPORTED = {
    "window without causality": "a window or ALiBi without causality reaches keys of later devices",
    "lengths": "with key_value_seq_lengths, only heads are exchanged",
    "dropout": "with dropout, only heads are exchanged",
    "score_mod": "with score_mod, only heads are exchanged",
    "mask_mod": "with mask_mod, only heads are exchanged",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_was_expected(report, name):
    assert WRONG[name] in report["refusals"][name]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_calls_that_no_strategy_can_run_get_every_reason(report, name):
    found = report["refusals"][name]
    assert found.startswith("NotImplementedError: no strategy can run this call, whose sequence")
    assert "heads: 8 devices do not divide 3 heads; " in found
    assert f"halo, ring, gather: {UNSUPPORTED[name]}" in found


def test_a_reason_names_the_strategies_that_it_speaks_against(report):
    found = report["refusals"]["window without causality"]
    assert "; ring: a ring sends all keys, of which a window hides most" in found
    # All keys of a device are in reach of a halo, and all rows are in order.
    assert "halo: " not in found


@pytest.mark.parametrize("name", ["documents, heads", "documents, window"])
def test_a_ring_alone_runs_the_order_of_documents(report, name):
    found = report["refusals"][name]
    assert "NotImplementedError: " in found
    assert "heads, gather: a ring alone knows the order of documents" in found
    assert "halo: a halo needs rows in contiguous order" in found


def test_documents_do_not_see_padding_and_find_rows_in_another_order(report):
    assert report["documents"] == dict.fromkeys(report["documents"], True)
    assert len(report["documents"]) == 3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("forward mode", "with context_axis there are gradients, but no forward-mode"),
        ("group of Explicit axes", "only rings and halos with one batch dim are possible"),
    ],
)
def test_what_cannot_be_done_in_a_shard_map_is_refused(report, name, sentence):
    found = report["refusals"][name]
    assert found.startswith("NotImplementedError: ") and sentence in found


@pytest.mark.parametrize(
    "name", ["jit, lengths", "jit, dropout", "jit, mask_mod", "jit, window without causality"]
)
def test_calls_under_jit_that_no_strategy_can_run_are_right_and_warned_of(report, name):
    assert report["refusals"][name] == "AttentionShardingWarning"
