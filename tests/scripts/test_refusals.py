"""refusals.py counts the rules that calls break."""

from __future__ import annotations

from dataclasses import replace

from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.scripts.refusals import count

PLAIN = Case("plain", t=256, s=256, h=64, v=64, dtype="bfloat16")


def test_calls_are_counted_by_rule():
    """Two calls with other numbers break the same rule; a call that breaks none is counted too."""
    capped = [replace(PLAIN, soft_cap=cap) for cap in (20.0, 30.0)]
    found = count([PLAIN, *capped], parse("gfx942"))
    assert (found.calls, found.forward, found.backward) == (3, 0, 2)
    assert found.refused == capped
    assert found.to_json()["reasons"] == [
        {
            "rule": "aiter/soft_cap_gradient",
            "reason": "CK does not compute the gradient under logits_soft_cap",
            "calls": 2, "alone": 2,
        }
    ]  # fmt: skip


def test_numbers_of_a_sentence_do_not_make_another_rule():
    wide = [replace(PLAIN, h=h, v=h, inference=True) for h in (264, 512)]
    found = count(wide, parse("gfx942"))
    assert all(x.startswith("aiter/") for x in found.rules), found.rules
    assert max(found.rules.values()) == found.forward == 2
