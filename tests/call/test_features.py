"""Features of calls: an implementation refuses those that it does not list."""

from __future__ import annotations

import pytest

from attn_dispatch.aiter.call_rules import call_reasons
from attn_dispatch.call import features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.flash import rules as flash_rules
from attn_dispatch.flash.generations import FA3
from attn_dispatch.reason import Reason
from attn_dispatch_tools.verify.case import Case
from tests.support.backend import forward_spec


def reasons_of(name: str, spec: AttentionSpec) -> tuple[Reason, ...]:
    match name:
        case "cudnn":
            return cudnn_rules.not_supported_reasons(spec)
        case "flash":
            return flash_rules.not_supported_reasons(spec, FA3, "sm90")
        case _:
            return call_reasons(spec)


@pytest.mark.parametrize("name", ["cudnn", "flash", "aiter"])
def test_a_feature_that_is_added_later_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    spec = forward_spec(Case("plain"))
    assert not [x for x in reasons_of(name, spec) if x.rule.startswith("feature/")]
    monkeypatch.setitem(features._HAS, "positive scores", lambda spec: True)
    (found,) = (x for x in reasons_of(name, spec) if x.rule.startswith("feature/"))
    assert found.rule == "feature/positive scores"
