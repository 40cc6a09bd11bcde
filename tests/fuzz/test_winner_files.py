"""Files of winners that somebody else has written: found right or not at all, nothing lost."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_files():
    found = outcomes("tests.fuzz.winner_files", range(DRAWS or 300), seconds=10.0)
    kinds = {"found, kept", "not found, kept", "not found, not kept"}
    assert kinds <= found.keys() <= kinds | {"found, not kept"}
    assert all(found[x] > 10 for x in kinds)
