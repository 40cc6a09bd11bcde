"""The cost model: bytes and operations counted by hand, measured times, and the choice."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, explain
from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.core.context import strategy_costs
from attn_dispatch.core.context.cost import (
    H100,
    H200,
    INFINITY_FABRIC,
    MI300X,
    NVLINK_4,
    PACKED_IMBALANCE,
    Cost,
    Devices,
    Hardware,
    Links,
    Pass,
    SpreadCall,
    choose,
    one_device,
    table,
)
from attn_dispatch.core.context.strategy_costs import all_gather, all_to_all, cost, costs, hop
from attn_dispatch.reason import Reason, rules_of
from tests.support.module_report import report_with_cuda_plugin
from tests.support.present import present

TWO_H200 = Hardware(Devices(2), NVLINK_4, H200)
EIGHT_H100 = Hardware(Devices(8), NVLINK_4, H100)
SLOW = Hardware(Devices(4, 2), Links(8.0, 4.0, 2.0, latency=0.0), H100)
"""Bytes per second that can be followed by hand."""


def call(length: int, heads: int = 32, kv_heads: int = 8, **facts) -> SpreadCall:
    return SpreadCall(1, length, length, heads, kv_heads, 128, 128, **facts)


MEASURED = [
    # strategy, tokens, window, milliseconds forward, with the backward pass, tolerance
    ("heads", 32768, None, 7.3, 27.8, 0.05),
    ("heads", 131072, None, 109, 413, 0.05),
    ("heads", 131072, 4096, 10.2, 34.0, 0.08),
    ("ring", 32768, None, 7.2, None, 0.08),
    ("ring", 131072, None, 110, None, 0.08),
    ("halo", 131072, 4096, 7.8, 31.1, 0.18),
]
"""Two H200, bfloat16, 32 heads over 8 of 128, causal. The ring's backward pass was autodiff's.
The halo's kernels took segment ids, which made them slower than the model's."""


@pytest.mark.parametrize(("strategy", "tokens", "window", "forward", "both", "tolerance"), MEASURED)
def test_measured_times(strategy, tokens, window, forward, both, tolerance: float):
    given = call(tokens, window=window, order="zigzag" if strategy == "ring" else "contiguous")
    found = cost(strategy, given, TWO_H200)
    assert found.seconds(needs_backward=False) * 1e3 == pytest.approx(forward, rel=tolerance)
    if both is not None:
        assert found.seconds() * 1e3 == pytest.approx(both, rel=tolerance)


@pytest.mark.parametrize(
    ("tokens", "window", "forward", "both"),
    [(32768, None, 13.1, 50.0), (131072, None, 212, 795), (131072, 4096, 13.4, 54.1)],
)
def test_measured_times_of_one_device(tokens, window, forward, both):
    """The chip's speed is of other calls than these."""
    found = one_device(call(tokens, window=window), H200)
    assert found[0] * 1e3 == pytest.approx(forward, rel=0.06)
    assert sum(found) * 1e3 == pytest.approx(both, rel=0.06)


def sent(strategy: str, given: SpreadCall, hardware: Hardware) -> tuple[float, ...]:
    return tuple(x.sent for x in cost(strategy, given, hardware).passes())


def test_bytes_are_those_counted_by_hand():
    """Arrays of 8 tokens, 8 heads over 2 of 4 and 2 numbers, on 4 devices."""
    given = SpreadCall(3, 8, 8, 8, 2, 4, 2, order="zigzag")
    hardware = Hardware(Devices(4), NVLINK_4, H100)
    q, out, k, v = (
        2 * math.prod(x) for x in [(3, 2, 8, 4), (3, 2, 8, 2), (3, 2, 2, 4), (3, 2, 2, 2)]
    )
    assert given.query_bytes == 4 * q and given.out_bytes == 4 * out
    assert given.kv_bytes == 4 * (k + v)
    # Two kv heads for four devices: all have both, and the gradients are an all-reduce in float32.
    one_way, in_float32 = (q + out) * 3 / 4, 2 * (k + v)
    backward = 2 * one_way + 3 * (k + v) + 6 * in_float32
    assert sent("heads", given, hardware) == (one_way + 3 * (k + v), backward)
    four = replace(given, kv_heads=4)
    one_way = (q + out + 2 * (k + v)) * 3 / 4
    assert sent("heads", four, hardware) == (one_way, 2 * one_way)
    assert sent("gather", given, hardware) == (3 * (k + v), 3 * (k + v + in_float32))
    # What the first device computes for others' keys is no sum yet, and stays in 16 bits.
    assert sent("ring", given, hardware) == (3 * (k + v), 4 * (k + v) + 2 * in_float32)
    halo = replace(given, window=1, order="contiguous")
    # A tile of keys would be more than all of a device's, and the last device sends none.
    assert sent("halo", halo, hardware) == ((k + v) * 3 / 4, (k + v) * 3 / 2)
    # Pairs of devices exchange heads, and two such pairs are a ring.
    within = (q + out + k + v) / 2
    ring = sent("heads+ring", given, hardware)
    assert ring == (within + k + v, 2 * within + 2 * (k + v))
    assert cost("heads+ring", given, hardware).split == (2, 2)
    contiguous = sent("heads+ring", replace(given, order="contiguous"), hardware)
    assert np.subtract(contiguous, ring).tolist() == [(q + out + k + v) / 2, q + out + k + v]


def test_another_order_costs_an_exchange_of_rows():
    given, hardware = SpreadCall(1, 8, 8, 4, 4, 4, 4), Hardware(Devices(4), NVLINK_4, H100)
    x = given.query_bytes / 4
    zigzag = replace(given, order="zigzag")
    for strategy, forward, backward in (("gather", 2, 4), ("ring", 4, 8), ("heads", 0, 0)):
        more = np.subtract(sent(strategy, given, hardware), sent(strategy, zigzag, hardware))
        np.testing.assert_allclose(more, (forward * x * 3 / 4, backward * x * 3 / 4))
    window = replace(given, window=1)  # with a window all rows see as much
    assert sent("gather", window, hardware) == sent(
        "gather", replace(window, order="zigzag"), hardware
    )
    found = cost("halo", replace(window, order="zigzag"), hardware)
    assert rules_of(found.reasons) == {"context/halo/order"}


def test_exchanges_wait_for_the_slowest_link():
    """Two nodes of 4 devices, each with 8 bytes/s within the node, 4 to one device, 2 outside."""
    assert all_to_all(7.0, SLOW) == 2.0  # 3 bytes within, 4 between
    assert all_to_all(7.0, SLOW, Devices(8)) == 7 / 8
    assert all_gather(2.0, SLOW) == 2.0 * 7 / 8  # 8 bytes come to the node, 2 by each device
    assert all_gather(2.0, replace(SLOW, links=replace(SLOW.links, between=1.0))) == 2.0
    assert hop(6.0, SLOW) == 3.0 and hop(6.0, replace(SLOW, devices=Devices(8))) == 1.5
    slow = replace(SLOW, links=replace(SLOW.links, latency=0.25))
    assert hop(6.0, slow) == 3.25 and all_gather(2.0, slow) == 1.75 + 3 * 0.25


def test_a_ring_hides_what_its_kernels_cover():
    given = call(131072, order="zigzag")
    forward, backward = cost("ring", given, EIGHT_H100).passes()
    assert forward.exposed == 0 and forward.hidden == pytest.approx(
        7 * hop(given.kv_bytes / 8, EIGHT_H100)
    )
    gradients = hop(given.kv_gradient_bytes / 8, EIGHT_H100)
    assert backward.exposed == pytest.approx(gradients)  # the last ones, behind the last kernel
    starved = replace(EIGHT_H100, links=Links(1e9, 1e9, 1e9))
    forward, _ = cost("ring", given, starved).passes()
    kernels = forward.flops / H100.forward
    assert forward.exposed + forward.hidden == pytest.approx(7 * hop(given.kv_bytes / 8, starved))
    assert forward.hidden == pytest.approx(7 / 8 * kernels)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (64, 512), (1, 512)])
def test_pairs_are_those_of_the_mask(queries: int, keys: int, window: int | None):
    t, s = np.arange(keys - queries, keys)[:, None], np.arange(keys)
    mask = s <= t
    if window is not None:
        mask &= s > t - window - 256
    found = SpreadCall(2, queries, keys, 1, 1, 8, 8, window=window).pairs
    assert found == pytest.approx(2 * mask.sum(), rel=0.35 if window else 0.01)
    assert found >= 1.99 * mask.sum() or window is None
    assert SpreadCall(2, queries, keys, 1, 1, 8, 8, is_causal=False).pairs == 2 * queries * keys


def test_packed_documents_cost_less_and_unbalance_zigzag_orders():
    one, packed = call(131072), call(131072, longest=4096)
    assert packed.pairs == one.pairs / 32
    loads = {}
    for strategy in ("heads", "gather", "ring"):
        found = cost(strategy, packed, EIGHT_H100).forward
        assert found is not None
        loads[strategy] = found.flops * 8 / packed.work
    assert loads == {"heads": 1, "gather": PACKED_IMBALANCE[1], "ring": PACKED_IMBALANCE[1]}
    balanced = cost("ring", replace(packed, order="documents"), EIGHT_H100).forward
    assert balanced is not None and balanced.flops == packed.work / 8


def test_rings_of_documents_take_as_long_as_was_measured():
    """131,072 tokens, forward and backward in milliseconds; documents of lengths with a long tail
    have as many pairs as ones of `longest` tokens."""
    four = replace(TWO_H200, devices=Devices(4))
    times: dict[SequenceOrder, float] = {"documents": 51.57, "zigzag": 73.12, "contiguous": 81.57}
    for order, milliseconds in times.items():
        found = cost("ring", call(131072, longest=25638, order=order), four)
        assert found.seconds() * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_many_devices_have_less_equal_work():
    few, many = (call(131072, longest=4096).unbalanced(x) for x in (31, 32))
    assert (few, many) == (PACKED_IMBALANCE[1], PACKED_IMBALANCE[32])


def test_sizes_that_do_not_fit_are_reasons():
    qwen = costs(call(131072, 28, 4), EIGHT_H100)
    reasons = {x.strategy: rules_of(x.reasons) for x in qwen if x.reasons}
    assert reasons == {"heads": {"context/heads/divide"}, "halo": {"context/halo/window"}}
    assert "8 devices do not divide 28 heads" in table(qwen)
    wide = costs(call(131072, window=20000), EIGHT_H100)
    reasons = {x.strategy: rules_of(x.reasons) for x in wide if x.reasons}
    assert reasons == {
        "halo": {"context/halo/window"},
        "ring": {"context/ring/window"},
        "heads+ring": {"context/ring/window"},
    }
    both_sides = cost("halo", call(131072, window=128, is_causal=False), EIGHT_H100)
    assert rules_of(both_sides.reasons) == {"context/keys_after"}
    prime = cost("heads+ring", call(131072, 8, 1), EIGHT_H100)
    assert rules_of(prime.reasons) == {"context/heads+ring/divide"}


def test_heads_are_exchanged_within_nodes():
    def split(heads: int, kv_heads: int, devices: Devices) -> tuple[int, int] | None:
        return strategy_costs.split(call(1024, heads, kv_heads), devices)

    assert split(28, 4, Devices(8)) == (4, 2)
    assert split(64, 8, Devices(8, 8)) == (8, 8)
    assert split(64, 8, Devices(8)) == (4, 2)  # 8 would leave no ring
    assert split(40, 8, Devices(8, 2)) == (8, 2)
    assert split(6, 3, Devices(8, 2)) is None  # 2 devices would cut a kv head


def test_the_choice():
    heads, gather = made("heads", 1.01, 3.0), made("gather", 1.0, 3.0, gathered=1e9)
    ring, halo = made("ring", 1.1, 2.8), Cost("halo", (Reason("context/halo/window"),))
    assert choose([halo, gather, heads]) is heads  # as fast, and always balanced
    assert choose([halo, gather, made("heads", 1.3, 3.0)]) is gather
    assert choose([ring, gather]) is ring
    assert choose([ring, gather], needs_backward=False) is gather
    assert choose([ring, gather], needs_backward=False, most_gathered=5e8) is gather
    assert choose([ring, gather], needs_backward=False, most_gathered=4e8) is ring
    assert choose([gather, halo], most_gathered=0) is gather
    assert choose([halo]) is None


def made(strategy: str, forward: float, backward: float, gathered: float = 0.0) -> Cost:
    first = Pass(0, 0, forward, 0, gathered=gathered / 2)
    return Cost(strategy, (), first, Pass(0, 0, 0, backward, gathered=gathered))


def test_the_choice_for_a_window():
    window = costs(call(131072, window=4096), EIGHT_H100)
    assert getattr(choose(window), "strategy", None) == "halo"


def test_a_choice_follows_the_links():
    """A ring has one of seven links to peers; with several nodes heads+ring is cheapest."""
    amd = Hardware(Devices(8), INFINITY_FABRIC, MI300X)
    ring, gather = (cost(x, call(16384, order="zigzag"), amd).seconds() for x in ("ring", "gather"))
    assert gather < ring
    nodes = Hardware(Devices.of(64), NVLINK_4, H100)
    chosen = choose(costs(call(131072, 64, 8), nodes))
    assert chosen is not None and (chosen.strategy, chosen.split) == ("heads+ring", (8, 8))


def test_given_reasons_replace_those_of_sizes():
    no_pages = Reason("context/features", (), "with pages, only heads are exchanged")
    found = costs(call(1024, 28, 4), EIGHT_H100, {"ring": (no_pages,)})
    reasons = {x.strategy: x.reasons for x in found if x.reasons}
    assert reasons == {"ring": (no_pages,), "heads+ring": (no_pages,)}
    assert all(x.seconds() == math.inf for x in found if x.reasons)


def test_heads_divide_where_calls_are_split():
    """Each of 8 devices has 3 of 24 heads, some of which share no kv head."""
    found = cost("heads", call(131072, 24, 3), EIGHT_H100)
    assert not found.reasons and found.gathered() > 0


def test_drawn_calls_are_never_faster_than_their_share():
    rng = np.random.default_rng(0)
    for _ in range(200):
        kv_heads = int(rng.integers(1, 17))
        length = 128 * int(2 ** rng.integers(4, 14))
        given = call(
            length, kv_heads * int(rng.integers(1, 9)), kv_heads,
            window=None if rng.random() < 0.5 else int(rng.integers(1, length)),
            order="zigzag" if rng.random() < 0.5 else "contiguous",
        )  # fmt: skip
        hardware = Hardware(Devices.of(int(2 ** rng.integers(1, 10))), NVLINK_4, H100)
        share = [x / hardware.devices.number for x in one_device(given, H100)]
        faster = replace(hardware, links=Links(1e12, 1e12, 1e12, 1e-9))
        for found in costs(given, hardware):
            for one, least in zip(found.passes(), share, strict=False):
                assert one.seconds >= least and one.exposed >= 0 and one.hidden >= 0
            assert cost(found.strategy, given, faster).seconds() <= found.seconds()


def test_the_table():
    lines = table(costs(call(131072, 64, 8), EIGHT_H100)).splitlines()
    assert lines[0].split("  ")[0] == "strategy"
    assert [x.split()[0] for x in lines] == [
        "strategy", "heads", "gather", "ring", "heads+ring", "halo:", "heads+ring",
    ]  # fmt: skip
    assert lines[4].startswith("heads+ring 4 x 2") and " ms" in lines[4]
    assert lines[5] == "halo: a halo needs a window of 1 to 16384 keys to the left"
    assert lines[6] == (
        "heads+ring 4 x 2: takes two mesh axes, one of 4 devices for heads and one of 2 for the "
        "ring"
    )
    assert table([Cost("ring")]).splitlines()[1] == "ring:"


def test_devices_fill_their_nodes():
    assert Devices.of(4) == Devices(4) and Devices.of(64) == Devices(8, 8)
    with pytest.raises(ValueError, match="expected at most 8 or a multiple of it, got 12"):
        Devices.of(12)


@pytest.mark.parametrize(
    ("strategy", "heads", "kv_heads", "window"),
    [
        ("heads", 64, 8, None), ("ring", 12, 4, None), ("gather", 12, 4, None),
        ("halo", 12, 4, 127), ("halo", 12, 4, 63),
    ],
)  # fmt: skip
def test_bytes_are_those_that_devices_exchange(strategy, heads: int, kv_heads: int, window):
    """A program also sends lse. What `explain` counts is compared with compiled programs in
    tests/whole_programs/test_exchanging_programs.py."""
    mesh, tokens = AbstractMesh((8,), ("context",)), 4096
    query, key = (
        jax.ShapeDtypeStruct(
            (1, tokens, n, 64), "bfloat16", sharding=NamedSharding(mesh, P(None, "context"))
        )
        for n in (heads, kv_heads)
    )  # fmt: skip
    options = {} if window is None else {"local_window_size": (window, 0)}
    with context_parallel(strategy):
        share = present(explain(query, key, key, is_causal=True, target="cpu", **options).share)
    given = SpreadCall(1, tokens, tokens, heads, kv_heads, 64, 64, window=window)
    modelled = sent(strategy, given, EIGHT_H100)
    ratios = np.divide((share.received_bytes, share.received_bytes_backward), modelled)
    assert np.all(ratios >= 1) and np.all(ratios <= 1.02), ratios


def test_a_ring_of_gpus_sends_what_is_modelled():
    """Received keys are not kept for the backward pass, and its first gradients have 16 bits.
    `explain_program` says the bytes of either pass."""
    for order, (of_program, modelled, listed) in report_with_cuda_plugin(
        "tests.core.context.sent_by_gpus"
    ).items():
        assert of_program == listed
        assert of_program == pytest.approx(modelled, rel=0.001 if order == "documents" else 0)
