"""Drawn files of plans: the right plan is read or built, whatever the file holds."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_files_are_read_or_replaced():
    found = outcomes("tests.fuzz.plan_files", range(DRAWS or 300), seconds=10.0)
    assert found.keys() == {"read", "built anew"} and min(found.values()) > 20
