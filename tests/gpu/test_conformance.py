"""The conformance suite on cuDNN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch import flash
from attn_dispatch.core import select
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import CASES
from attn_dispatch_tools.verify.suite import Conformance


class TestCudnn(Conformance):
    implementation = "cudnn"

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(self, case: Case, record):
        outcome = self.check(case)
        record(**outcome.to_json())
        assert outcome.failures == ()
        if outcome.status == "refused":
            pytest.skip("; ".join(outcome.reasons))


def test_cudnn_is_chosen_without_a_preference(monkeypatch):
    """No other package with a faster kernel is installed."""
    monkeypatch.setattr(flash.library, "version", lambda: None)
    q = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.bfloat16)
    explanation = attn_dispatch.explain(q, q, q, is_causal=True)
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("cudnn", "cudnn")
    assert explanation.device.is_present
    assert select.names()[0] == "cudnn"
