"""Calls with wide heads: the named and the drawn ones, and that the suite and XLA agree on them."""

from __future__ import annotations

import json

import pytest

from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import compiled, wide_calls
from attn_dispatch_tools.verify.calls import custom_calls_in, custom_calls_of
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.suite import Conformance
from attn_dispatch_tools.verify.wide_cases import WIDE_HEADS, wide_examples
from tests.support.fa4_emulated import emulated


class OnXla(Conformance):
    implementation = "xla"


@pytest.mark.parametrize("case", wide_examples(6, 5), ids=str)
def test_drawn_calls_pass_the_suite(case: Case):
    outcome = OnXla().check(case)
    assert (outcome.status, outcome.failures) == ("passed", ())


def test_same_seed_draws_the_same_cases():
    first = wide_examples(30, 5)
    assert wide_examples(60, 5)[:30] == first and wide_examples(30, 6) != first
    for case in first:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_their_custom_calls_count_as_those_of_the_implementation():
    wide = (compiled.WIDE_FORWARD_TARGET, compiled.WIDE_BACKWARD_TARGET)
    text = " ".join(f"custom_call @{x}(%0)" for x in wide)
    assert custom_calls_in(text) == {*custom_calls_of("fa4").values()}


def test_drawn_calls_have_all_that_the_kernels_tell_apart():
    drawn = wide_examples(300, 1)
    assert all(257 <= x.h <= 512 for x in drawn)
    for found in (
        {x.dtype for x in drawn}, {x.k == x.n for x in drawn}, {x.lse_grad for x in drawn},
        {x.alignment for x in drawn if x.is_causal}, {x.h % 8 > 0 for x in drawn},
        {x.deterministic for x in drawn}, {x.h > 384 for x in drawn}, {x.v != x.h for x in drawn},
    ):  # fmt: skip
        assert len(found) == 2
    assert {(x.t > x.s) - (x.t < x.s) for x in drawn} == {-1, 0, 1}


def test_most_of_them_run_on_the_compiled_kernels(monkeypatch):
    library = emulated().library
    monkeypatch.setattr(compiled, "find", lambda: library)
    sm90, refused = parse("sm90"), {}
    for case in (*WIDE_HEADS, *wide_examples(300, 1)):
        spec = spec_of(case.forward_options(), case.avals())
        assert wide_calls.is_wide(spec)
        if reasons := wide_calls.not_supported_reasons(spec, library.on(sm90.arch)):
            refused[case.name] = {x.rule for x in reasons}
    assert refused.pop("wide_heads/window") == {"fa4/wide_window"}
    known = {"fa4/wide_causal", "fa4/wide_head_dim"}  # no float16 set for 384 among stand-ins
    assert set.union(*refused.values()) <= known and len(refused) < 120
