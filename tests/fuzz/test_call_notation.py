"""Drawn calls in text and in files give a clear error, or the explanation of that call."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_calls_are_explained_or_refused():
    found = outcomes("tests.fuzz.call_notation", range(DRAWS or 400), seconds=10.0)
    assert {"explained", "explained as it is", "packed", "calls", "ValueError"} <= found.keys()
    assert min(found[x] for x in ("explained", "explained as it is", "calls")) > 10
