"""The `attn-dispatch` command."""

from __future__ import annotations

import argparse
import re
import sys
from importlib import import_module

from attn_dispatch._version import __version__
from attn_dispatch.choices import did_you_mean
from attn_dispatch.text import error_text
from attn_dispatch_tools.terminal.ending import dying_of_interrupts, run_process, run_to_the_end
from attn_dispatch_tools.terminal.help import Formatter

_DESCRIPTION = """\
One attention call for JAX, by the best kernel for the device: cuDNN on NVIDIA, AITER on AMD, XLA
everywhere else. `attn-dispatch COMMAND --help` has the options of a command, and examples.
"""

_COMMANDS = {
    "info": ("commands.info", "devices, vendor libraries, and which implementations work"),
    "explain": (
        "commands.explain",
        "what would run a call, here or on another device, and why not the rest",
    ),
    "explain-program": (
        "commands.explain_program", "what would run each attention call of a program of yours"
    ),
    "mask": ("pictures.command", "who attends to whom, as text or as a picture"),
    "verify": ("verify.command", "check an implementation on this device, case by case"),
    "bench": (
        "bench.command", "measure speed and memory beside other packages that are installed"
    ),
    "tune": ("commands.tune", "find out what runs calls fastest on this GPU, and keep it"),
    "plan": ("commands.plan", "plan calls ahead, for processes that make them later"),
    "build-aiter": ("build_aiter.command", "build AITER's libraries for AMD GPUs"),
    "build-fa4": ("build_fa4.command", "compile FlashAttention-4's kernels for NVIDIA GPUs"),
    "completion": (
        "commands.completion", "a script with which your shell completes all of this"
    ),
}  # fmt: skip
"""The module of each command, and its line in the list of commands."""

_WITHOUT_SETTINGS = ("build-aiter", "build-fa4", "completion")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command."""
    if arguments is None:
        run_process(lambda: _run(sys.argv[1:]))
    else:
        run_to_the_end(lambda: _run(arguments))


def _run(arguments: list[str]) -> None:
    whole = parser(only=next((x for x in arguments if x in _COMMANDS), ""))
    _check_command(whole, arguments)
    chosen, unknown = whole.parse_known_args(_with_negative_values(arguments))
    if unknown:
        _unknown(chosen.command_parser, unknown)
    if chosen.command not in _WITHOUT_SETTINGS:
        _check_settings()
    chosen.parser = parser  # the completion command needs it
    chosen.run(chosen)


def _check_settings() -> None:
    """Raise an error if an environment variable that commands read has a wrong value."""
    from attn_dispatch.devices.target import device_for

    try:
        device_for("cpu")  # reads the settings, but needs no device
    except ValueError as error:
        raise SystemExit(f"error: {error_text(error)}") from error


def _check_command(whole: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Raise an error for a misspelt command, which names the nearest one."""
    if arguments and (name := arguments[0]) not in _COMMANDS and not name.startswith("-"):
        meant = did_you_mean(name, _COMMANDS)
        whole.error(f"COMMAND: expected one of {', '.join(_COMMANDS)}; got {name!r}{meant}")


def _unknown(command: argparse.ArgumentParser, words: list[str]) -> None:
    """Raise an error for words that the command does not know, which names the nearest option."""
    meant = did_you_mean(words[0], _options(command))
    command.error(f"unrecognized arguments: {' '.join(words)}{meant}")


def _options(command: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"(?<=\[)--[a-z-]+", command.format_usage())


def _with_negative_values(arguments: list[str]) -> list[str]:
    """The arguments with `--window -1,-1` as one word. argparse would read it as two options."""
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
    """The names of the commands, in the order of the help."""
    return [*_COMMANDS]


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of `attn-dispatch` with all of its commands.

    Args:
      only: the name of the only command whose module is imported, because importing JAX takes most
        of a second. Other commands get a name and a line of help only. With `only=None`, all
        modules are imported.
    """
    whole = argparse.ArgumentParser(
        prog="attn-dispatch", description=_DESCRIPTION, formatter_class=Formatter
    )
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for name, (module, help) in _COMMANDS.items():
        if only in (None, name):
            with dying_of_interrupts():
                found = import_module(f"attn_dispatch_tools.{module}")
            found.add_parser(commands, help)
        else:
            commands.add_parser(name, help=help)
    return whole
