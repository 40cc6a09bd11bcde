"""One style of help for all commands: description, options, examples."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

from attn_dispatch_tools.terminal.text import width

Commands = Any
"""What `ArgumentParser.add_subparsers` returns; its class is private to argparse."""


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], None],
    *,
    help: str,
    description: str,
    examples: tuple[str, ...] = (),
    notes: str = "",
) -> argparse.ArgumentParser:
    """Add the parser of one command.

    Args:
      commands: the list of commands to add it to.
      name: the command's name.
      run: the function that runs the command, given the parsed arguments.
      help: a line for the list of all commands.
      description: paragraphs, which are filled to the terminal's width; indented lines stay.
      examples: whole command lines, listed at the end of the help.
      notes: paragraphs like those of the description, before the examples.
    """
    shown = "".join(f"  {x}\n" for x in examples)
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=notes + (f"\nexamples:\n{shown}" if examples else ""),
        formatter_class=Formatter,
    )
    parser.set_defaults(run=run, command_parser=parser)
    return parser


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add --verbose to a command that shows what runs calls."""
    parser.add_argument(
        "--verbose", action="store_true", help="name cuDNN's engines, such as eng9_k24=1, as well"
    )


def one_name(text: str) -> str:
    """The value of an option that is repeated for several names, as a `type` of argparse."""
    if "," in text:
        raise argparse.ArgumentTypeError(f"expected one name, got {text!r}; repeat the option")
    return text


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the terminal's width, and leaves paragraphs with indented lines alone."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{"width": width(), "max_help_position": 26} | kwargs)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an action, and leave room for indented names of commands, which argparse does not."""
        super().add_argument(action)
        for command in self._iter_indented_subactions(action):
            length = len(self._format_action_invocation(command)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(self._filled(x, width, indent) for x in paragraphs)

    def _filled(self, paragraph: str, width: int, indent: str) -> str:
        lines = paragraph.splitlines()
        if any(line.startswith(" ") for line in lines):
            return "\n".join(indent + line for line in lines)
        return textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)
