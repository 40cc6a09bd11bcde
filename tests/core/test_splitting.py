"""Which mesh axes split a call: into batch, heads, or rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel
from attn_dispatch.call.context import Context
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.options import AttentionOptions, Meaning
from attn_dispatch.core.context.cost import choose
from attn_dispatch.core.context.strategies import Spread, reasons
from attn_dispatch.core.context.strategy_costs import modelled
from attn_dispatch.core.shards import Shards
from attn_dispatch.core.splitting import split
from attn_dispatch.reason import rules_of
from tests.support.present import present

MESH = {"x": 2, "y": 4}
BOTH = P(None, ("x", "y"))


def call(heads: int = 3, kv_heads: int = 1, batch: int = 1, rows: int = 64, **meaning: Any):
    shapes = ((batch, rows, heads, 8), *((batch, rows, kv_heads, 8),) * 2)
    options = AttentionOptions(
        operands=("query", "key", "value"), meaning=Meaning(scale=0.3, is_causal=True, **meaning)
    )
    return LeadingCall.of([jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes], options)


def axes(found: Shards) -> dict[str, tuple[str, ...]]:
    """The axes by what they split."""
    named = {"batch": found.leading[0], "heads": found.heads, "rows": found.rows}
    named |= {"unused": tuple(x for x, _ in found.unused)}
    return {x: y for x, y in named.items() if y}


def test_axes_split_what_they_shard_in_query():
    found = split(call(heads=4, batch=2), MESH, P("x", None, "y"), P("x"))
    assert axes(found) == {"batch": ("x",), "heads": ("y",)} and found.strategy is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (call(heads=8), {"heads": ("x", "y")}),
        (call(heads=4), {"heads": ("y",), "unused": ("x",)}),
        (call(heads=4, batch=2), {"batch": ("x",), "heads": ("y",)}),
        (call(batch=2), {"batch": ("x",), "unused": ("y",)}),
        (call(), {"unused": ("x", "y")}),
    ],
)
def test_heads_are_exchanged_and_then_the_batch(given, expected):
    assert axes(split(given, MESH, BOTH, BOTH, wanted="heads")) == expected


def test_heads_divide_although_kv_heads_do_not():
    """The modelled choice and the split have the same rule."""
    given, rows = call(heads=24, kv_heads=3), P(None, "x")
    found = split(given, {"x": 8}, rows, rows, wanted="heads")
    assert axes(found) == {"heads": ("x",)} and not found.kv_heads
    spread = Spread.of(given.spec, 8, "contiguous")
    assert spread is not None and not modelled(given.spec, spread)[0].reasons


def test_heads_with_a_ring_are_not_chosen_along_one_axis():
    """Llama 3 70B, 1M tokens: heads with a ring would be fastest; heads alone gather 13 GB."""
    shapes = (jax.ShapeDtypeStruct((1, 1 << 20, x, 128), jnp.bfloat16) for x in (64, 8, 8))
    given = LeadingCall.of(list(shapes), call().options)
    spread = Spread.of(given.spec, 64, "contiguous")
    assert spread is not None
    assert present(choose(modelled(given.spec, spread))).strategy == "heads+ring"
    rows = P(None, "x")
    assert split(given, {"x": 64}, rows, rows).strategy == "ring"


def test_rows_stay_only_along_axes_in_the_order_of_the_mesh():
    """JAX numbers the devices of a permute in the order of the mesh, whatever is asked for."""
    reverse = P(None, ("y", "x"))
    with context_parallel("ring"):
        assert axes(split(call(), MESH, reverse, reverse)) == {"unused": ("y", "x")}


def test_halo_needs_segments_in_one_piece():
    ids = ("query", "key", "value", "query_segment_ids", "key_value_segment_ids")
    window = Meaning(scale=1.0, is_causal=True, window=(4, None), same_lengths=True)
    whole = replace(window, max_segments=3)
    assert rules_of(reasons("halo", Spread(window, ids, 8, 8, 4))) == {"context/halo/ids"}
    assert not reasons("halo", Spread(whole, ids, 8, 8, 4))


@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("given", [call(heads=8), call(batch=2), call()])
def test_named_strategy_splits_rows_although_heads_divide(strategy, given):
    with context_parallel(strategy):
        found = split(given, MESH, BOTH, BOTH)
    assert axes(found) == {"rows": ("x", "y")} and found.strategy == strategy


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (call(rows=4), {"unused": ("x", "y")}),
        (call(dropout_rate=0.5), {"unused": ("x", "y")}),
        (call(dropout_rate=0.5, heads=8), {"heads": ("x", "y")}),
    ],
)
@pytest.mark.parametrize("wanted", ["auto", "ring"])
def test_rows_are_whole_where_no_strategy_runs_the_call(given, expected, wanted):
    assert axes(split(given, MESH, BOTH, BOTH, wanted=wanted)) == expected


def test_no_device_repeats_work_if_rows_can_be_split():
    for given in (call(), call(heads=4), call(batch=2), call(heads=6, kv_heads=3)):
        assert "unused" not in axes(split(given, MESH, BOTH, BOTH, wanted="auto"))


def test_the_rest_of_the_axes_splits_rows_if_a_halo_does_not_fit():
    found = split(call(heads=4, window=(40, 0)), MESH, BOTH, BOTH, wanted="halo")
    assert "rows" in axes(found) and found.strategy in ("gather", "ring")


def test_in_a_shard_map_only_the_last_axes_are_exchanged():
    context = Context(("x", "y"), 8)
    found = split(call(batch=2), MESH, BOTH, BOTH, wanted="heads", context=context)
    assert "batch" not in axes(found)  # "x" divides it, but its devices hold distant rows
    found = split(call(batch=4), MESH, BOTH, BOTH, wanted="heads", context=context)
    assert axes(found)["batch"] == ("y",)
    found = split(call(batch=8), MESH, BOTH, BOTH, wanted="heads", context=context)
    assert axes(found) == {"batch": ("x", "y")}


def test_order_of_a_shard_map_is_that_of_the_split():
    context = Context(("x", "y"), 8, "zigzag")
    found = split(call(), MESH, BOTH, BOTH, wanted="ring", context=context)
    assert (found.order, found.strategy) == ("zigzag", "ring")
    assert found.context == Context(("x", "y"), 8, "zigzag", "ring")
