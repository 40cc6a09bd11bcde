"""One style of help for all commands: description, options, examples."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

from attn_dispatch_tools.terminal.text import width


class Settings(TypedDict, total=False):
    """What argparse is told about an option."""

    action: str
    choices: Iterable[str]
    const: object
    default: object
    dest: str
    help: str
    metavar: str | None
    nargs: str
    required: bool
    type: Callable[[str], object]


Option = tuple[str, Settings]
"""The name and settings of an option or, if the name has no dashes, of an argument."""


def option(name: str, metavar: str | None, help: str, /, **settings: Unpack[Settings]) -> Option:
    """An option with a value, or an argument."""
    return name, {"metavar": metavar, "help": help, **settings}


def flag(name: str, help: str, /, **settings: Unpack[Settings]) -> Option:
    """An option without a value."""
    return name, {"action": "store_true", "help": help, **settings}


VERBOSE = flag("--verbose", "name cuDNN's engines, such as eng9_k24=1, as well")
"""An option of commands that show what runs calls."""

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
    options: Sequence[Option] = (),
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
      options: the command's options and arguments, in the order of the help.
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
    add_options(parser, *options)
    return parser


def add_options(group: argparse._ActionsContainer, *options: Option) -> None:
    """Add options to a parser, or to a group of its options."""
    for name, settings in options:
        group.add_argument(name, **settings)


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
