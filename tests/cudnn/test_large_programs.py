"""Mods that read many arrays, or do a great deal: run by cuDNN, or refused where one can look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
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
    """A score_mod that multiplies the score by a number of each head, again and again."""
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


def reads_in_vain(score, b, n, t, s):
    """The array decides between two equal numbers."""
    return jnp.where(jnp.arange(256)[t] > 3, score, score) * 2.0


def reasons(score_mod: Mod) -> tuple[Reason, ...]:
    explanation = explain(Q, Q, Q, score_mod=score_mod, target="sm90")
    return next(x.reasons for x in explanation.forward if x.implementation == "cudnn")


@needs_cudnn
def test_many_arrays_are_planned():
    """As many buffers as a call has: the arrays, query, key, value and the output."""
    assert reasons(with_arrays(28)) == ()
    spec = PlanCase(case("arrays", n=8, k=8), score_mod=with_arrays(40)).spec("forward")
    native = native_libraries.load(native_libraries.CUDA)
    operands, _ = native.buffers(asdict(variants_of(spec)[0]))
    assert len(operands) == 3 + 40


@needs_cudnn
@pytest.mark.parametrize("count", [257, 1000])
def test_what_no_graph_holds_is_a_reason(count: int):
    (reason,) = reasons(with_operations(count))
    most = f"a cuDNN graph holds at most {MAX_NODES}"
    assert str(reason) == f"mods: {count:,} operations, and {most}"


@needs_cudnn
@pytest.mark.parametrize("count", [63, 100])
def test_more_arrays_than_cudnn_runs_are_a_reason(count: int):
    (reason,) = reasons(with_arrays(count))
    assert (
        str(reason) == f"mods: {count:,} arrays, and a cuDNN graph holds at most {MAX_NODE_ARRAYS}"
    )


@needs_cudnn
def test_what_cudnn_finds_too_large_is_a_reason():
    """Beside its own operations there is room for fewer."""
    (reason,) = reasons(with_operations(255))
    assert "numOps exceeds MAX_OPGRAPH_OPS" in str(reason)


@needs_cudnn
def test_an_array_that_nobody_needs_is_not_passed():
    spec = PlanCase(case("in vain", n=8, k=8), score_mod=reads_in_vain).spec("forward")
    nodes = nodes_of(spec, packed=False)
    assert not isinstance(nodes, str) and nodes.arrays == ()
    assert reasons(reads_in_vain) == ()
