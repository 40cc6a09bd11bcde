"""What the commands that build libraries share: how they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from attn_dispatch.text import error_text


class BuildError(Exception):
    """A build cannot continue. The message says why and what to do."""


@contextmanager
def ending_with_a_message() -> Iterator[None]:
    """Within this context a failure ends the process with a message."""
    try:
        yield
    except (BuildError, OSError, ValueError) as error:
        sys.exit(f"error: {error_text(error)}")
    except KeyboardInterrupt:
        print("Interrupted; the same command continues the build.", file=sys.stderr)
        sys.exit(130)
