"""Device properties that somebody else has written: refused by name, or a device to plan for."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_files():
    # Of these seeds some ask cuDNN, which compiles: that takes it a second, or several.
    found = outcomes("tests.fuzz.target_files", range(DRAWS or 300), seconds=20.0)
    assert {"refused", "as it is, taken", "altered, taken"} <= found.keys()
    assert min(found[x] for x in ("refused", "as it is, taken", "altered, taken")) > 20
