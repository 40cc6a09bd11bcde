"""Drawn folders of AITER's builds are used, or refused with a sentence."""

from __future__ import annotations

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_folders_are_used_or_refused():
    counts = outcomes("tests.fuzz.aiter_folders", range(DRAWS or 200))
    assert counts["used as it is"] >= 10
    assert len(counts) >= 5, counts
