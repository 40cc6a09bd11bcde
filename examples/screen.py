"""The terminal, as the examples print to it."""

from typing import NoReturn

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> NoReturn:
        """`| head` has read enough: run_process ends the example as it ends any command."""
        raise BrokenPipeError


console = Console(highlight=False)
