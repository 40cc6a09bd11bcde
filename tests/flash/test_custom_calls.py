"""FlashAttention's custom calls equal those of dew-flash-attn's Python package."""

from __future__ import annotations

import json

import pytest

from attn_dispatch.flash import kernels
from attn_dispatch.flash.generations import ALL
from tests.scripts import flash_calls

RECORDED = json.loads(flash_calls.KEPT.read_text())


def test_recorded_calls_cover_every_target():
    symbols = {x["custom_call"].split("(")[0].lstrip("@") for x in RECORDED}
    assert symbols == {x.symbol for generation in ALL for x in generation.targets}
    assert any(kernels.splits(flash_calls.call_of(_facts(x))) > 1 for x in RECORDED)


def test_custom_calls_equal_the_recorded_ones():
    for row in RECORDED:
        assert flash_calls.ours(_facts(row)) == row["custom_call"], row


def test_custom_calls_equal_those_of_the_installed_package():
    package = flash_calls.imported()
    if package is None:
        pytest.skip("needs dew-flash-attn")
    for facts in flash_calls.drawn():
        assert flash_calls.ours(facts) == flash_calls.theirs(package, facts), facts


def _facts(row: dict) -> dict:
    return {x: y for x, y in row.items() if x != "custom_call"}
