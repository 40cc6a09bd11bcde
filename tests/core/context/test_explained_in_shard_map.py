"""`explain` in a shard_map plans what the call with `context_axis` plans there, and refuses it with
the same reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention, explain, explain_program
from attn_dispatch.core.explanation import Explanation
from tests.support.present import present

ROWS = P(None, "context")
AUTO = (AxisType.Auto, AxisType.Auto)
CAUSAL: dict[str, Any] = {"is_causal": True}
WINDOW = {"is_causal": True, "local_window_size": (1024, 0)}
PACKED = {"is_causal": True, "max_segments": 3}


@dataclass(frozen=True)
class Found:
    """A call on eight devices as it is explained."""

    inside: Explanation
    """In the shard_map."""
    program: Explanation
    """As a call of the program."""
    refusal: str
    """The message of the NotImplementedError with which the call is lowered; "" without one."""


def structs(mesh: AbstractMesh, heads: int) -> list[jax.ShapeDtypeStruct]:
    sharding = NamedSharding(mesh, ROWS)
    shapes = ((1, 65536, heads, 128), (1, 65536, 4, 128))
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes]
    return [*arrays, jax.ShapeDtypeStruct((1, 65536), jnp.int32, sharding=sharding)]


def found(heads: int, *, tensor: int = 1, kinds: tuple[AxisType, ...] = AUTO, **options) -> Found:
    mesh = AbstractMesh((8 // tensor, tensor), ("context", "tensor"), axis_types=kinds)
    inside: list[Explanation] = []

    def attend(query, key, ids):
        given = {"context_axis": "context", **options}
        if "max_segments" in options:
            given["query_segment_ids"] = ids
        inside.append(explain(query, key, key, target="cpu", **given))
        return dot_product_attention(query, key, key, **given)

    program = jax.jit(
        jax.shard_map(attend, mesh=mesh, in_specs=ROWS, out_specs=ROWS, axis_names={"context"})
    )
    given = structs(mesh, heads)
    refusal = ""
    with jax.sharding.use_abstract_mesh(mesh):
        (call,) = explain_program(program, *given, target="cpu").calls
        try:
            program.trace(*given).lower(lowering_platforms=("cpu",))
        except NotImplementedError as error:
            refusal = str(error)
    return Found(inside[0], call.explanation, refusal)


@pytest.mark.parametrize("strategy", ["auto", "gather"])
@pytest.mark.parametrize("heads", [28, 32])
@pytest.mark.parametrize("options", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_the_plan_is_that_of_the_sharded_call(options, heads: int, strategy):
    query, key, _ = structs(AbstractMesh((8,), ("context",)), heads)
    with context_parallel(strategy):
        expected = explain(query, key, key, target="cpu", **options)
        got = found(heads, **options)
    share, wanted = present(got.inside.share), present(expected.share)
    assert not got.refusal and not share.refusal
    assert got.inside.call == expected.call == got.program.call
    assert share.strategy == wanted.strategy == present(got.program.share).strategy
    assert share.strategies == wanted.strategies
    assert share.received_bytes == wanted.received_bytes
    assert got.inside.chosen_backward == "xla"
    assert share.split == (("context", 8),)
    assert "in a shard_map over 'context' (8)" in str(share)


def test_order_counts():
    with context_parallel("ring"):
        zigzag, documents = (
            present(found(28, sequence_order=x, **PACKED).inside.share)
            for x in ("zigzag", "documents")
        )
    assert zigzag.strategy == documents.strategy == "ring"
    reasons = [
        {x.strategy: bool(x.reasons) for x in share.strategies} for share in (zigzag, documents)
    ]
    assert [x["gather"] for x in reasons] == [False, True]


def test_other_axes_are_named():
    assert "along 'tensor' (2) is not known" in str(found(32, tensor=2, **CAUSAL).inside.share)


@pytest.mark.parametrize(
    ("heads", "more", "options"),
    [
        (28, {}, WINDOW | PACKED | {"sequence_order": "documents"}),
        (28, {}, CAUSAL | {"key_value_seq_lengths": jnp.array([7])}),
        (28, {}, {"mask_mod": lambda b, n, t, s: t % 5 >= s % 7}),
        (32, {"tensor": 2, "kinds": (AxisType.Explicit,) * 2}, CAUSAL),
    ],
    ids=["documents with a window", "lengths", "mask_mod", "Explicit axes"],
)
def test_refusals_are_those_of_the_call(heads: int, more, options):
    got = found(heads, **more, **options)
    assert got.refusal
    for explanation in (got.inside, got.program):
        assert present(explanation.share).refusal == got.refusal
        assert explanation.chosen_forward is None
        assert {x.reasons[0].text for x in explanation.forward} == {got.refusal}
    assert got.inside.chosen_backward is None
    flat = " ".join(str(got.inside).split())
    assert "chosen none" in flat and f"refused {got.refusal}" in flat


def test_mask_is_that_of_all_devices():
    mask = present(found(32, mask_mod=lambda b, n, t, s: t // 32768 == s // 32768).inside.mask)
    assert mask.pairs == pytest.approx(0.5, abs=0.05)
