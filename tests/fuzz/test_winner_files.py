"""Drawn files of winners: a winner is found correctly or not at all, and none is lost."""

from tests.fuzz.child import DRAWS, outcomes


def test_drawn_files_give_the_winner_or_none_and_lose_nothing():
    found = outcomes("tests.fuzz.winner_files", range(DRAWS or 300), seconds=10.0)
    kinds = {"found, kept", "not found, kept", "not found, not kept"}
    assert kinds <= found.keys() <= kinds | {"found, not kept"}
    assert all(found[x] > 10 for x in kinds)
