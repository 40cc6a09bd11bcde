"""Drawn command lines end with a status and a line, without a traceback."""

from attn_dispatch_tools import cli
from tests.fuzz.child import DRAWS, outcomes


def test_drawn_command_lines_end_without_a_traceback():
    found = outcomes("tests.fuzz.command_lines", range(DRAWS or 250), seconds=60.0)
    for command in cli.names():
        assert found[f"{command}: usage"] + found[f"{command}: an error"] > 0, command
    for command in ("explain", "mask", "info", "completion", "verify"):
        assert found[f"{command}: done"] > 0, command
