"""`explain` of arrays sharded along the sequence lists what each strategy would cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, explain
from tests.support.present import present

MESH = AbstractMesh((8,), ("context",))
ROWS = P(None, "context")
CAUSAL, WINDOW = {"is_causal": True}, {"is_causal": True, "local_window_size": (1024, 0)}


def explained(heads: int, spec: P = ROWS, **options):
    query, key = (
        jax.ShapeDtypeStruct(
            (1, 65536, n, 128), jnp.bfloat16, sharding=NamedSharding(MESH, spec)
        )
        for n in (heads, 4)
    )  # fmt: skip
    found = explain(query, key, key, target="cpu", **options)
    return found, found.share


@pytest.mark.parametrize(("options", "expected"), [(CAUSAL, "ring"), (WINDOW, "halo")])
def test_the_cheapest_strategy_runs(options, expected):
    share = present(explained(28, **options)[1])
    able = {x.strategy: x for x in share.strategies if not x.reasons}
    assert share.strategy == expected == min(able, key=lambda x: able[x].seconds())
    assert f"keys come by {expected}" in str(share)


def test_every_strategy_is_listed_with_its_cost_or_its_reasons():
    found, share = explained(28, **CAUSAL)
    listed = {x.strategy for x in present(share).strategies}
    assert listed == {"heads", "gather", "ring", "halo", "heads+ring"}
    text = str(found)
    assert "strategies, modelled" in text
    assert "heads: 28 heads over 4 do not divide over 8 devices" in text
    assert "halo: a halo needs a window of 1 to 8192 keys to the left" in text


def test_named_strategy_is_explained():
    with context_parallel("gather"):
        assert present(explained(28, **CAUSAL)[1]).strategy == "gather"


def test_whole_sequences_have_no_strategies():
    share = explained(32, P(None, None, None), **CAUSAL)[1]
    assert share is None or not share.strategies
