"""Drawn folders of AITER's builds: used, or a sentence."""

from __future__ import annotations

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_folders():
    counts = outcomes("tests.fuzz.aiter_folders", range(DRAWS or 200))
    assert counts["used as it is"] >= 10
    assert len(counts) >= 5, counts
