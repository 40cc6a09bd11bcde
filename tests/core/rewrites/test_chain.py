"""A chain of rewrites: which arrays each of its calls gets."""

from __future__ import annotations

from attn_dispatch_tools.verify.cases import CASES
from tests.scripts.sameness import lowered_case


def test_a_call_beside_another_gets_its_own_arrays():
    """AITER's dropout mask for XLA's backward pass, read by a call that is itself rewritten."""
    (case,) = [x for x in CASES if x.name == "found/dropout_mask_wide_heads"]
    found = lowered_case(case, "gfx942")
    assert found["program"].count("attn_dispatch_aiter_forward") > 1
    (backward,) = [
        x for x in found["verdicts"] if x["call"].startswith("backward") and x["plan"] != "None"
    ]
    assert backward["implementation"] == "xla"
