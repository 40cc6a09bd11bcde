"""The `attn-dispatch` command."""

from __future__ import annotations

import argparse

from attn_dispatch._version import __version__
from attn_dispatch.aiter.build import command as build_aiter
from attn_dispatch.bench import command as bench
from attn_dispatch.commands import completion, explain, info
from attn_dispatch.conformance import command as verify
from attn_dispatch.pictures import command as mask
from attn_dispatch.planning import plan, tune
from attn_dispatch.terminal.help import Formatter

_DESCRIPTION = """\
One attention call for JAX, by the best kernel for the device: cuDNN on NVIDIA, AITER on AMD, XLA
everywhere else. `attn-dispatch COMMAND --help` has the options of a command, and examples.
"""

_COMMANDS = {
    "info": info,
    "explain": explain,
    "mask": mask,
    "verify": verify,
    "bench": bench,
    "tune": tune,
    "plan": plan,
    "build-aiter": build_aiter,
    "completion": completion,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command."""
    chosen = parser().parse_args(arguments)
    chosen.parser = parser  # completion scripts are made of it
    chosen.run(chosen)


def names() -> list[str]:
    """Of its commands, in the order of the help."""
    return [*_COMMANDS]


def parser() -> argparse.ArgumentParser:
    """That of the command, with all of its commands."""
    whole = argparse.ArgumentParser(
        prog="attn-dispatch", description=_DESCRIPTION, formatter_class=Formatter
    )
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for each in _COMMANDS.values():
        each.add_parser(commands)
    return whole
