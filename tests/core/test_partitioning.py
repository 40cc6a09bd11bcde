"""Arrays sharded over several devices: correct results without unnecessary gathers."""

from __future__ import annotations

import pytest

from tests.support.module_report import report_of

TOLERANCE = 5e-6  # shards can sum in another order


@pytest.fixture(scope="module")
def report():
    return report_of("tests.core.partitioned_calls")


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize(
    "sharding",
    ["batch", "heads", "batch_and_heads", "batch_over_both", "heads_over_both", "sequence"],
)
def test_sharded_call_under_jit_is_correct(report, sharding, kv_heads):
    assert report[f"{sharding}-{kv_heads}"]["error"] <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("batch-2", ["x"]),
        ("batch-1", ["x"]),
        ("batch_over_both-2", [["x", "y"]]),
        ("heads-8", [None, None, "y"]),
        ("heads-2", [None, None, "y"]),
        ("batch_and_heads-8", ["x", None, "y"]),
        ("batch_and_heads-2", ["x", None, "y"]),
        ("heads_over_both-8", [None, None, ["x", "y"]]),
    ],
)
def test_batch_and_kv_heads_stay_sharded(report, name, out):
    assert not report[name]["gathers"]
    assert report[name]["out"] == out


def test_call_along_explicit_axes_is_correct(report):
    assert report["explicit"]["error"] <= TOLERANCE


_OPERANDS = (
    *(f"bias/{i}" for i in range(5)), "mask/0", "query_seq_lengths/0", "key_value_seq_lengths/0",
    "query_segment_ids/0", "sinks/shared", "sinks/0", "alibi_slopes/shared", "alibi_slopes/0",
    "causal_alignment/shared", "causal_alignment/0",
)  # fmt: skip


@pytest.mark.parametrize("sharding", ["batch", "batch_and_heads", "heads_over_both"])
@pytest.mark.parametrize("operand", _OPERANDS)
def test_other_operands_need_no_gather(report, operand, sharding):
    """A shared operand's gradient is a sum over the devices; nothing is gathered for it."""
    found = report[f"{operand}-{sharding}"]
    assert found["error"] <= 5e-5  # gradients of shared operands sum over all rows
    assert not found["gathers"]


@pytest.mark.parametrize("sharding", ["batch", "heads"])
def test_packed_sequences_need_no_gather(report, sharding):
    found = report[f"packed-{sharding}"]
    assert found["error"] <= TOLERANCE and not found["gathers"]


def test_sharded_dropout_draws_the_mask_of_the_whole_call(report):
    assert report["dropout"] <= TOLERANCE


@pytest.mark.parametrize("name", ["shard_map", "shard_map_window", "shard_map_bias"])
def test_gradients_under_shard_map_are_correct(report, name):
    assert report[name] <= 2e-5  # gradients of shared operands sum over all rows
