"""Calls in a line of text and in files: a clear error, or an explanation of just that call."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_calls():
    found = outcomes("tests.fuzz.call_notation", range(DRAWS or 400), seconds=10.0)
    assert {"explained", "explained as it is", "packed", "calls", "ValueError"} <= found.keys()
    assert min(found[x] for x in ("explained", "explained as it is", "calls")) > 10
