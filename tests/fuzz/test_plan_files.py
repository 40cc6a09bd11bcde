"""Files of plans that somebody else has written: the right plan comes of each."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_files():
    found = outcomes("tests.fuzz.plan_files", range(DRAWS or 300), seconds=10.0)
    assert found.keys() == {"read", "built anew"} and min(found.values()) > 20
