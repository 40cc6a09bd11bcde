"""FlashAttention's custom calls are those that dew-flash-attn's own Python makes."""

from __future__ import annotations

import json

import pytest

from attn_dispatch.flash import buffers
from attn_dispatch.flash.generations import ALL
from tests.scripts import flash_calls

KEPT = json.loads(flash_calls.KEPT.read_text())


def test_every_target_is_compared():
    symbols = {x["custom_call"].split("(")[0].lstrip("@") for x in KEPT}
    assert symbols == {x.symbol for generation in ALL for x in generation.targets}
    assert any(buffers.splits(flash_calls.call_of(_facts(x))) > 1 for x in KEPT)


def test_ours_are_those_that_were_compared():
    for row in KEPT:
        assert flash_calls.ours(_facts(row)) == row["custom_call"], row


def test_the_package_still_makes_them():
    package = flash_calls.imported()
    if package is None:
        pytest.skip("needs dew-flash-attn")
    for facts in flash_calls.drawn():
        assert flash_calls.ours(facts) == flash_calls.theirs(package, facts), facts


def _facts(row: dict) -> dict:
    return {x: y for x, y in row.items() if x != "custom_call"}
