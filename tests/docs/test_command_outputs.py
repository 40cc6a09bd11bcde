"""docs/cli.md shows the real output of commands."""

from __future__ import annotations

import re

import jax
import pytest

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch_tools import cli
from tests.scripts import command_outputs

BLOCKS = command_outputs.blocks()
_MEASURED = ("verify --cases", "bench", "plan")


def test_the_page_shows_most_commands():
    shown = {name for name in cli.names() for line, _ in BLOCKS if f"attn-dispatch {name}" in line}
    assert shown == {"info", "explain", "mask", "verify", "bench", "plan"}


@pytest.mark.parametrize(("line", "shown"), BLOCKS, ids=[line for line, _ in BLOCKS])
def test_a_command_prints_the_output_on_the_page(line: str, shown: str):
    if jax.default_backend() != "cpu":
        pytest.skip("the page was made on a machine without a GPU")
    if "dispatch plan" in line and not cudnn_library.find().is_usable:
        pytest.skip("cuDNN is not installed")
    assert _general(line, command_outputs.output_of(line)) == _general(line, shown)


def _general(line: str, text: str) -> list[str]:
    """The lines of an output without the parts that differ between machines.

    These are versions, installed packages, and every measured number with the spaces around it.
    """
    command = line.partition("attn-dispatch ")[2]
    text = re.sub(r"\b\d+(?:[._]\d+){2}[\w.]*", "VERSION", text)
    if command.startswith("info"):
        return [x for x in text.splitlines() if x and not x.startswith(" ")]
    if command.startswith(_MEASURED):
        text = re.sub(r"[ \d.,-]+", " ", text)
    return text.splitlines()
