"""Drawn custom calls of AITER: refused with a sentence, or run inside their buffers."""

from __future__ import annotations

from fuzz import aiter_calls
from fuzz.child import DRAWS, outcomes


def test_drawn_calls():
    aiter_calls.write_real_calls()
    counts = outcomes("fuzz.aiter_calls", range(DRAWS or 250))
    assert counts["ran"] >= 25
    assert counts["prepared, too large to run"] >= 1
    assert sum(x.startswith("refused: ") for x in counts) >= 15, counts
