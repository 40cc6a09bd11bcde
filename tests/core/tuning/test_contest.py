"""Tuning against a clock with set times: who wins, and what is tuned at all."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, explain, settings, tuning
from attn_dispatch.core import select
from attn_dispatch.core.tuning import contest, winners
from attn_dispatch.devices.target import CPU, parse
from attn_dispatch.inspection import spec_of
from tests.support.present import present
from tests.support.tuning_toy import SPEC, TIMES, Q


def test_fastest_choice_with_right_results_is_kept(toy, capsys):
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    assert winner is not None
    assert (winner.implementation, winner.engine, winner.untuned) == ("toy", "2 2", "toy")
    assert winner.microseconds == {
        "toy 2 2": 70.0, "toy 2": 80.0, "toy 1": 90.0, "xla": 95.0, "toy": 100.0,
    }  # fmt: skip
    messages = capsys.readouterr().err
    assert "tuned: forward pass, query float32[2,48,4,16], key float32[2,48,4,16]" in messages
    assert "left out: toy wrong: other numbers than toy in out\n" in messages
    assert "left out: toy raises: out of luck\n" in messages
    assert "absent" not in messages
    (winner_entry,) = json.loads(present(winners.winners_file()).read_text())["winners"]
    assert winner_entry["call"] == {
        "pass": "forward", "query": "float32[2,48,4,16]", "key": "float32[2,48,4,16]",
        "value": "float32[2,48,4,16]", "is_causal": True,
    }  # fmt: skip


def test_kept_winner_runs_and_is_explained(toy):
    def loss(q):
        return (dot_product_attention(q, q, q, is_causal=True) ** 2).sum()

    untuned = jax.jit(jax.grad(loss))(Q)
    assert set(toy.ran) == {""}
    with tuning():
        jax.jit(jax.grad(loss))(Q)
    assert toy.ran[-2:] == ["2 2", "2 2"]  # the program's forward and backward passes
    toy.ran.clear()
    jax.clear_caches()
    tuned = jax.jit(jax.grad(loss))(Q)  # nothing is tuned here; the kept winner is found
    assert toy.ran == ["2 2", "2 2"]
    np.testing.assert_allclose(tuned, untuned, rtol=1e-6)
    explanation = explain(Q, Q, Q, is_causal=True)
    assert explanation.chosen_forward == explanation.chosen_backward == "toy"
    assert "runs: 2 2, scratch memory" in str(explanation)
    assert "tuned:     toy 2 2 70.0 µs (toy 2 80.0, toy 1 90.0, xla 95.0, 1 more)" in str(
        explanation
    )
    assert [x.implementation for x in explanation.forward].count("toy") == 1
    scaled = explain(Q, Q, Q, is_causal=True, scale=0.3)
    assert scaled.forward[0].tuned is not None  # a scale changes no time
    assert explain(Q, Q, Q).forward[0].tuned is None  # another call


def test_another_implementation_can_win(toy, monkeypatch):
    monkeypatch.setitem(TIMES, "xla", 60e-6)
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    assert winner is not None and winner.implementation == "xla"
    assert explain(Q, Q, Q, is_causal=True).chosen_forward == "xla"
    # If the caller names implementations, only the first eligible one's engines compete.
    named = SPEC.by("toy", "xla")
    assert select.winner(named, CPU) is None
    with tuning():
        assert present(contest.tune(named, CPU)).engine == "2 2"
    # Under this policy no call runs on XLA instead of a kernel, even if XLA is faster.
    with attn_dispatch.fallback("error"):
        assert explain(Q, Q, Q, is_causal=True).chosen_forward == "toy"


def test_insignificantly_faster_engine_does_not_replace_the_untuned_choice(toy, monkeypatch):
    for name in TIMES:
        monkeypatch.setitem(TIMES, name, 99.5e-6)
    with tuning():
        winner = present(contest.tune(SPEC, CPU))
    assert (winner.implementation, winner.engine) == ("toy", "")
    assert explain(Q, Q, Q, is_causal=True).forward[0].tuned == winner


def test_calls_are_tuned_only_on_request_and_once(toy, monkeypatch):
    dot_product_attention(Q, Q, Q)
    assert not present(winners.winners_file()).exists()
    with tuning():
        first = contest.tune(SPEC, CPU)
        toy.ran.clear()
        assert contest.tune(SPEC, CPU) == first and toy.ran == []
    monkeypatch.setenv("ATTN_DISPATCH_TUNING", "5")
    jax.clear_caches()
    dot_product_attention(Q, Q, Q)
    assert "wrong" in toy.ran


def test_no_engines_are_tried_after_the_time_limit(toy, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(contest.time, "monotonic", lambda: float(next(now)))
    with tuning(0.5):  # over when the clock is read again, whoever else reads it
        winner = present(contest.tune(SPEC, CPU))
    assert set(winner.microseconds) == {"toy", "xla"}


def test_interrupt_stops_after_the_current_engine(toy, monkeypatch, capsys):
    """The interrupt arrives in the thread that waits for the engines' times."""
    started, original = threading.Event(), contest._try
    monkeypatch.setattr(contest, "_try", lambda *x: (started.set(), original(*x))[1])

    def interrupted(future):
        started.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with tuning(), pytest.raises(KeyboardInterrupt):
        contest.tune(SPEC, CPU)
    assert "interrupted" in capsys.readouterr().err and select.winner(SPEC, CPU) is None


def test_implementation_that_fails_to_list_engines_is_tuned_without_them(toy, monkeypatch, capsys):
    def fails(spec, device):
        raise OSError("boom")

    monkeypatch.setattr(select.named("toy")._module, "other_engines", fails, raising=False)  # pyright: ignore[reportAttributeAccessIssue]
    with tuning():
        assert contest.tune(SPEC, CPU) is not None
    assert "toy: other_engines failed: boom" in capsys.readouterr().err


def test_calls_with_dropout_and_empty_calls_are_not_tuned(toy):
    key = jax.random.key(0)
    dropout = spec_of(query=Q, key=Q, value=Q, dropout_rate=0.5, dropout_key=key)
    empty = spec_of(query=Q[:, :0], key=Q, value=Q)
    with tuning():
        assert contest.tune(dropout, CPU) is None
        assert contest.tune(empty, CPU) is None


def test_tuning_without_the_gpu_or_in_several_processes_raises(toy, monkeypatch):
    with tuning(), pytest.raises(RuntimeError, match="there is no NVIDIA H200"):
        contest.tune(SPEC, replace(parse("sm90"), platform="cpu"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with tuning(), pytest.raises(RuntimeError, match="if each of several processes tuned"):
        contest.tune(SPEC, CPU)


def test_tuning_may_be_off_by_the_variable(monkeypatch):
    for off in ("off", "0", ""):
        monkeypatch.setenv("ATTN_DISPATCH_TUNING", off)
        assert settings.current().tuning_seconds is None
