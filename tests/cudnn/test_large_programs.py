"""Mods with many arrays or operations: cuDNN runs them, or explain gives a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import explain
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.cudnn.score_nodes import MAX_NODE_ARRAYS, MAX_NODES, nodes_of
from attn_dispatch.devices import native_libraries
from attn_dispatch.reason import Reason
from attn_dispatch_tools.verify.sizes import case
from tests.support.backend import needs_cudnn
from tests.support.plan_cases import PlanCase

Mod = Callable[..., Any]
Q = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.bfloat16)


def with_arrays(count: int) -> Mod:
    """A score_mod that multiplies the score by `count` arrays with one number for each head."""
    factors = [jnp.linspace(0.9, 1.1, 8) + i / 1000 for i in range(count)]

    def score_mod(score, b, n, t, s):
        for factor in factors:
            score = score * factor[n]
        return score

    return score_mod


def with_operations(count: int) -> Mod:
    def score_mod(score, b, n, t, s):
        for _ in range(count):
            score = jnp.tanh(score)
        return score

    return score_mod


def with_unneeded_array(score, b, n, t, s):
    """The array chooses between two equal numbers."""
    return jnp.where(jnp.arange(256)[t] > 3, score, score) * 2.0


def reasons(score_mod: Mod) -> tuple[Reason, ...]:
    explanation = explain(Q, Q, Q, score_mod=score_mod, target="sm90")
    return next(x.reasons for x in explanation.forward if x.implementation == "cudnn")


@needs_cudnn
def test_call_with_many_arrays_is_planned():
    """The buffers of a call are the mods' arrays, query, key, value and the output."""
    assert reasons(with_arrays(28)) == ()
    spec = PlanCase(case("arrays", n=8, k=8), score_mod=with_arrays(40)).spec("forward")
    native = native_libraries.load(native_libraries.CUDA)
    operands, _ = native.buffers(variants_of(spec)[0].attributes)
    assert len(operands) == 3 + 40


@needs_cudnn
@pytest.mark.parametrize("count", [257, 1000])
def test_too_many_operations_give_a_reason(count: int):
    (reason,) = reasons(with_operations(count))
    limit = f"a cuDNN graph holds at most {MAX_NODES}"
    assert str(reason) == f"mods: {count:,} operations, and {limit}"


@needs_cudnn
@pytest.mark.parametrize("count", [63, 100])
def test_too_many_arrays_give_a_reason(count: int):
    (reason,) = reasons(with_arrays(count))
    assert (
        str(reason) == f"mods: {count:,} arrays, and a cuDNN graph holds at most {MAX_NODE_ARRAYS}"
    )


@needs_cudnn
def test_graph_that_cudnn_finds_too_large_gives_a_reason():
    """cuDNN's own operations take some of the graph's room."""
    (reason,) = reasons(with_operations(255))
    assert "numOps exceeds MAX_OPGRAPH_OPS" in str(reason)


@needs_cudnn
def test_unneeded_array_is_not_passed():
    spec = PlanCase(case("unneeded array", n=8, k=8), score_mod=with_unneeded_array).spec("forward")
    nodes = nodes_of(spec, packed=False)
    assert not isinstance(nodes, Reason) and nodes.arrays == ()
    assert reasons(with_unneeded_array) == ()
