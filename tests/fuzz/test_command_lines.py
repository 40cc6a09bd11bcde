"""Command lines with anything in them: each ends with a status and a line, not a traceback."""

from attn_dispatch_tools import cli
from tests.fuzz.child import DRAWS, outcomes


def test_drawn_command_lines():
    found = outcomes("tests.fuzz.command_lines", range(DRAWS or 250), seconds=60.0)
    for command in cli.names():
        assert found[f"{command}: usage"] + found[f"{command}: an error"] > 0, command
    for command in ("explain", "mask", "info", "completion", "verify"):
        assert found[f"{command}: done"] > 0, command
