"""The console to which the examples print."""

from typing import NoReturn

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> NoReturn:
        """End the example like any command whose output is no longer read, as with `| head`."""
        raise BrokenPipeError


console = Console(highlight=False)
