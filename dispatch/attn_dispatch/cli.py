"""The `attn-dispatch` command."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys

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

_CUT_OFF = 128 + 13
"""What shells call a program that SIGPIPE ended."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    whole = parser()
    _check_command(whole, arguments)
    chosen = whole.parse_args(_with_negative_values(arguments))
    chosen.parser = parser  # completion scripts are made of it
    try:
        chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_CUT_OFF) from None


def _check_command(whole: argparse.ArgumentParser, arguments: list[str]) -> None:
    """A misspelt command is an error that names the nearest one."""
    if arguments and (name := arguments[0]) not in _COMMANDS and not name.startswith("-"):
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        also = f"; did you mean {near[0]}?" if near else ""
        whole.error(f"COMMAND: expected one of {', '.join(_COMMANDS)}; got {name!r}{also}")


def _with_negative_values(arguments: list[str]) -> list[str]:
    """`--window -1,-1` as one word, which argparse else takes for two options."""
    if not arguments or arguments[0] not in ("explain", "mask"):
        return arguments
    joined: list[str] = []
    for word in arguments:
        if re.match(r"-\d", word) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


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
