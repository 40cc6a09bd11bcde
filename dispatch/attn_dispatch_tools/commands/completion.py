"""The `attn-dispatch completion` command: prints a script with which a shell completes commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from attn_dispatch_tools.terminal.help import Commands, add_command

_DESCRIPTION = """\
Print a script that completes commands and options in your shell. shtab makes it (pip install
shtab). The script is static: pressing the tab key starts nothing of this package.
"""
_NOTES = """\
Where it goes:

  bash  ~/.local/share/bash-completion/completions/attn-dispatch
  zsh   ~/.zfunc/_attn-dispatch, with fpath=(~/.zfunc $fpath) in ~/.zshrc
        before compinit
  fish  ~/.config/fish/completions/attn-dispatch.fish
"""
SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: Commands, help: str) -> None:
    """Add `completion` to the parser of `attn-dispatch`."""
    parser = add_command(
        commands, "completion", main, help=help,
        description=_DESCRIPTION, notes=_NOTES,
        examples=("attn-dispatch completion bash > attn-dispatch.bash",),
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS)


def main(args: argparse.Namespace) -> None:
    """Print the script for the shell."""
    try:
        import shtab
    except ImportError:
        raise SystemExit("error: completion scripts are made by shtab: pip install shtab") from None
    parser = args.parser()
    for action in _actions(parser):
        if action.type is Path:
            kind = shtab.DIRECTORY if action.metavar == "FOLDER" else shtab.FILE
            action.complete = kind  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options and arguments of the parser and of the parsers of its commands.

    Each command's description becomes its line in the list of commands, which shells show beside
    the name.
    """
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for line in action._get_subactions():
                command = action.choices[line.dest]
                command.description = line.help
                yield from _actions(command)
