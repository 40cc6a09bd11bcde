"""A chain of rewrites: the arrays that each of its calls receives."""

from __future__ import annotations

from attn_dispatch_tools.verify.cases import CASES
from tests.scripts.sameness import lowered_case


def test_second_call_is_rewritten_into_several_calls():
    """XLA's backward pass reads AITER's dropout mask from a second call that is rewritten, too."""
    (case,) = [x for x in CASES if x.name == "found/dropout_mask_wide_heads"]
    found = lowered_case(case, "gfx942")
    assert found["program"].count("attn_dispatch_aiter_forward") > 1
    (backward,) = [
        x for x in found["verdicts"] if x["call"].startswith("backward") and x["plan"] != "None"
    ]
    assert backward["implementation"] == "xla"
