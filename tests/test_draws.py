"""Calls drawn at random, everything at once, through the conformance suite on XLA."""

from __future__ import annotations

import json

from hypothesis import given, settings

from attn_dispatch.conformance import draws
from attn_dispatch.conformance.case import Case
from attn_dispatch.conformance.suite import Conformance


class OnXla(Conformance):
    implementation = "xla"


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(draws.cases(draws.SMALL))
def test_any_call(case: Case):
    outcome = OnXla().check(case)
    assert (outcome.status, outcome.failures) == ("passed", ())


def test_a_seed_draws_the_same_cases_again():
    first = draws.examples(30, seed=5)
    assert len(first) == len({case.name for case in first}) == 30
    assert draws.examples(30, seed=5) == first
    assert draws.examples(30, seed=6) != first
    for case in first:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_everything_is_drawn():
    """None of the features is so rare that some hundred cases go without it."""
    cases = [case for seed in range(4) for case in draws.examples(100, seed)]
    facts = [
        "mask", "bias", "alibi", "sinks", "soft_cap", "dropout", "lse_grad", "needs_max",
        "deterministic", "inference", "q_lengths", "kv_lengths", "q_segments", "cu_q",
        "max_segments", "score_shift", "dead_rows", "infinite_bias", "is_causal",
    ]  # fmt: skip
    assert [name for name in facts if not any(getattr(case, name) for case in cases)] == []
    assert {case.transform for case in cases} == {"jit", "vmap", "scan", "checkpoint"}
