"""Drawn device properties are refused, or give a device to plan for."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_files_are_refused_or_give_a_device():
    # For some seeds cuDNN plans, and compiles for a second or longer.
    found = outcomes("tests.fuzz.target_files", range(DRAWS or 300), seconds=20.0)
    assert {"refused", "as it is, taken", "altered, taken"} <= found.keys()
    assert min(found[x] for x in ("refused", "as it is, taken", "altered, taken")) > 20
