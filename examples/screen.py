"""The console to which the examples print."""

from typing import NoReturn

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> NoReturn:
        """Ends the example as run_process ends any command whose reader, such as head, has left."""
        raise BrokenPipeError


console = Console(highlight=False)
