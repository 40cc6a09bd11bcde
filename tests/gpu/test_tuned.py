"""Tuning on the device: winners are right and found again, and engines may be missing later."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import cudnn, dot_product_attention, tuning
from attn_dispatch.core import select
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.operands import made_for
from attn_dispatch.devices.target import device_for
from attn_dispatch.inspection import spec_of

Q, K, V = (
    jax.random.normal(jax.random.key(i), (2, 1024, heads, 128), jnp.bfloat16)
    for i, heads in enumerate((8, 2, 2))
)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "winners.json"))


def gradients(implementation):
    def loss(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))


@pytest.mark.parametrize("implementation", [None, "cudnn"])
def test_a_winner_is_right_and_found_again(implementation, record):
    with tuning(3):
        inside = gradients(implementation)(Q, K, V)
    kept = json.loads(Path(os.environ["ATTN_DISPATCH_WINNERS"]).read_text())["winners"]
    assert sorted(x["call"]["pass"] for x in kept) == ["backward", "forward"]
    record(winners=kept)
    program = gradients(implementation)
    engines = re.findall(r'engine = "([^"]*)"', program.lower(Q, K, V).as_text())
    assert sorted(engines) == sorted(x["engine"] for x in kept if x["implementation"] == "cudnn")
    expected = gradients("xla")(Q, K, V)
    for found in (inside, program(Q, K, V)):
        for a, b in zip(found, expected, strict=True):
            a, b = np.float32(a), np.float32(b)
            assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


def specs():
    forward, backward = spec_of(query=Q, key=K, value=V, is_causal=True).in_training(
        ("query", "key", "value")
    )
    return forward, backward


def test_each_timed_engine_runs_by_its_name():
    """A program with a named engine gives the results that the engine gave when it was timed."""
    forward, _ = specs()
    device = device_for("cuda")
    named = forward.by("cudnn")
    with tuning(3):
        jax.jit(
            lambda q, k, v: dot_product_attention(
                q, k, v, is_causal=True, implementation="cudnn", return_lse=True
            )
        )(Q, K, V)
    winner = select.winner(named, device)
    assert winner is not None
    operands = {"query": Q, "key": K, "value": V}
    expected, _ = select.by_engine(named, device, "cudnn", "").compute(device, operands)
    for name in winner.microseconds:
        choice = select.by_engine(named, device, "cudnn", name.removeprefix("cudnn").strip())
        out, _ = jax.jit(choice.compute, static_argnums=0)(device, operands)
        difference = np.float32(out) - np.float32(expected)
        assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(np.float32(expected)), name


@pytest.mark.parametrize("engine", ["99", "99 STREAM_K=1", "99 A_KNOB_TO_COME=1"])
def test_heuristics_replace_an_engine_that_is_missing(engine, monkeypatch):
    """The program was lowered for another cuDNN, which had the engine."""
    forward, _ = specs()
    device = device_for("cuda")
    operands = made_for(forward)
    expected = jax.jit(lambda x: cudnn.forward(forward, device, x))(operands)
    attributes = cudnn._ffi_attributes
    monkeypatch.setattr(cudnn, "_ffi_attributes", lambda x: attributes(replace(x, engine=engine)))
    got = jax.jit(lambda x: cudnn.forward(forward, device, x))(operands)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_a_text_that_names_no_engine_is_refused(monkeypatch):
    forward, _ = specs()
    device = device_for("cuda")
    operands = made_for(forward)
    attributes = cudnn._ffi_attributes
    monkeypatch.setattr(cudnn, "_ffi_attributes", lambda x: attributes(replace(x, engine="none")))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r'engine: expected words .* got "none"'):
        jax.jit(lambda x: cudnn.forward(forward, device, x))(operands)


def test_winners_of_another_version_are_not_used():
    forward, _ = specs()
    device = device_for("cuda")
    with tuning(1):
        gradients(None)(Q, K, V)
    kept = select.winner(forward, device)
    assert kept is not None
    os.remove(os.environ["ATTN_DISPATCH_WINNERS"])
    winners.keep(replace(kept, versions={**kept.versions, "cuDNN": "9.0.0"}))
    assert select.winner(forward, device) is None
