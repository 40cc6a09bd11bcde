"""The `attn-dispatch completion` command: a script with which a shell completes the others."""

from __future__ import annotations

import argparse

from attn_dispatch.terminal.help import Commands, add_command

_DESCRIPTION = """\
Print a script that completes commands and options in your shell. It is made by shtab (pip install
shtab), and static: nothing of this package is started when you press the tab key.
"""
_NOTES = """\
Where it goes:

  bash  ~/.local/share/bash-completion/completions/attn-dispatch
  zsh   a folder of $fpath, as _attn-dispatch
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
    """Print it."""
    try:
        import shtab
    except ImportError:
        raise SystemExit("error: completion scripts are made by shtab: pip install shtab") from None
    print(shtab.complete(args.parser(), shell=args.shell))
