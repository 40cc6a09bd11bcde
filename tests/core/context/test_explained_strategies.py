"""`explain` of arrays sharded along the sequence lists what each strategy would cost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, explain
from attn_dispatch.text import in_units
from tests.support.present import present

MESH = AbstractMesh((8,), ("context",))
ROWS = P(None, "context")
CAUSAL, WINDOW = {"is_causal": True}, {"is_causal": True, "local_window_size": (1024, 0)}


def explained(heads: int, spec: P = ROWS, kv_heads: int = 4, target: str = "cpu", **options):
    query, key = (
        jax.ShapeDtypeStruct(
            (1, 65536, n, 128), jnp.bfloat16, sharding=NamedSharding(MESH, spec)
        )
        for n in (heads, kv_heads)
    )  # fmt: skip
    found = explain(query, key, key, target=target, **options)
    return found, found.share


@pytest.mark.parametrize(("options", "expected"), [(CAUSAL, "ring"), (WINDOW, "halo")])
def test_the_cheapest_strategy_runs(options, expected):
    share = present(explained(28, **options)[1])
    able = {x.strategy: x for x in share.strategies if not x.reasons}
    able = {x: y for x, y in able.items() if y.mesh_axes == 1}
    assert share.strategy == expected == min(able, key=lambda x: able[x].seconds())
    assert f"keys come by {expected}" in str(share)


def test_a_ring_of_documents_in_order_is_as_slow_as_measured():
    """By what is modelled of it alone it would be faster than heads, which it is not."""
    query, key = (
        jax.ShapeDtypeStruct(
            (1, 32768, n, 128), jnp.bfloat16, sharding=NamedSharding(MESH, ROWS)
        )
        for n in (16, 4)
    )  # fmt: skip
    ids = jax.ShapeDtypeStruct((1, 32768), jnp.int32, sharding=NamedSharding(MESH, ROWS))
    share = present(
        explain(query, key, key, query_segment_ids=ids, target="cpu", **CAUSAL).share
    )  # fmt: skip
    assert share.strategy is None and "tokens are exchanged for heads" in str(share)


def test_a_strategy_of_two_mesh_axes_says_so():
    found, share = explained(32, kv_heads=8, **CAUSAL)
    axes = {x.strategy: x.mesh_axes for x in present(share).strategies if not x.reasons}
    assert axes == {"heads": 1, "gather": 1, "ring": 1, "heads+ring": 2}
    assert "heads+ring 4 x 2: takes two mesh axes, one of 4 devices for heads" in str(found)


def test_every_strategy_is_listed_with_its_cost_or_its_reasons():
    found, share = explained(28, **CAUSAL)
    listed = {x.strategy for x in present(share).strategies}
    assert listed == {"heads", "gather", "ring", "halo", "heads+ring"}
    text = str(found)
    assert "strategies, modelled" in text
    assert "heads: 8 devices do not divide 28 heads" in text
    assert "halo: a halo needs a window of 1 to 8192 keys to the left" in text


def test_named_strategy_is_explained():
    with context_parallel("gather"):
        assert present(explained(28, **CAUSAL)[1]).strategy == "gather"


def test_whole_sequences_have_no_strategies():
    share = explained(32, P(None, None, None), **CAUSAL)[1]
    assert share is None or not share.strategies


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "part", "strategy", "sent"),
    [
        (64, 8, (65536, 8, 1), "heads", 264241152),  # 7/8 of q, k, v and out
        (28, 4, (8192, 28, 4), "ring", 234881024),  # of 7 others k and v, and all rows in order
    ],
    ids=["Llama 3 70B", "Qwen2.5-7B"],
)
def test_models_on_amd_gpus(device: str, heads: int, kv_heads: int, part, strategy: str, sent: int):
    found, share = explained(heads, kv_heads=kv_heads, target=device, **CAUSAL)
    call, text = found.call, str(present(share))
    assert (call.seq_len_q, call.num_heads, call.num_kv_heads) == part
    words = {
        "heads": "tokens are exchanged for heads along 'context' (8)",
        "ring": "rows stay where they are, keys come by ring",
    }
    assert words[strategy] in text
    for verdicts in (found.forward, found.backward):
        (chosen,) = [x for x in verdicts if x.is_eligible and x.implementation != "xla"]
        assert chosen.implementation == "aiter" and "asm v3 bf16" in str(chosen.plan)
    (cost,) = [x for x in present(share).strategies if x.strategy == strategy]
    assert present(cost.forward).sent == sent
    assert in_units(sent) in str(found)


def test_sums_over_a_spread_cache_are_explained():
    query, key = (
        jax.ShapeDtypeStruct((4, t, n, 128), jnp.bfloat16, sharding=NamedSharding(MESH, spec))
        for t, n, spec in ((1, 16, P()), (65536, 4, ROWS))
    )
    share = present(explain(query, key, key, target="cpu").share)
    assert share.strategy == "keys"
    out, sum_and_maximum = 4 * 16 * 128 * 4, 2 * 4 * 16 * 4
    assert "keys stay where they are, and devices sum results" in str(share)
    # Sums send every number but a device's own twice.
    assert share.received_bytes == 2 * (out + sum_and_maximum) * 7 // 8
    assert share.received_bytes_backward == 2 * out * 7 // 8


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("queries", "strategy", "what"),
    [
        (1, "pages", "pages stay where they are, and devices sum results"),
        (4, "pages", "pages stay where they are, and devices sum results"),
        (32, None, "keys are gathered (each of several causal"),
    ],
)
def test_spread_pages_are_explained(kind: AxisType, queries: int, strategy, what: str):
    mesh = AbstractMesh((8,), ("pool",), axis_types=(kind,))

    def struct(shape: tuple[int, ...], *spec: str, dtype: Any = jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    pool = struct((4096, 64, 8, 128), "pool")
    table, lengths = (struct(x, dtype=jnp.int32) for x in ((16, 256), (16,)))
    query = struct((16, queries, 32, 128))
    found = explain(
        query, key_pages=pool, value_pages=pool, page_table=table, key_value_seq_lengths=lengths,
        target="cpu",
    )  # fmt: skip
    share = present(found.share)
    assert share.strategy == strategy and what in str(share)
    if strategy:
        assert found.call.shape("key_pages") == (1, 512, 64, 8, 128)
        assert found.call.shape("query") == (16 * queries, 1, 32, 128)
        results = 16 * queries * 32 * (128 + 2) * 4  # out, and of each row a sum and a maximum
        assert share.received_bytes == 2 * results * 7 // 8
    else:
        assert share.received_bytes == 2 * 4096 * 64 * 8 * 128 * 2 * 7 // 8
    assert share.received_bytes_backward is None
