"""Command line options for the arguments of a call that are no arrays."""

from __future__ import annotations

import argparse
from typing import cast

from attn_dispatch.call.keywords import CallArguments
from attn_dispatch.inspection import Shaped
from attn_dispatch_tools.terminal.help import add_options, flag, option


def add_mask_flags(group: argparse._ArgumentGroup) -> None:
    """Add the options for causality, its alignment and a window."""
    add_options(
        group,
        flag("--causal", "is_causal=True", dest="is_causal"),
        flag("--bottom-right", 'causal_alignment="bottom_right"',
            const="bottom_right", dest="causal_alignment", action="store_const"),
        option("--window", "W", "local_window_size: W, or LEFT,RIGHT with none for an open side",
            type=window, dest="local_window_size"),
    )  # fmt: skip


def given(args: argparse.Namespace, names: tuple[str, ...]) -> CallArguments[Shaped]:
    """The arguments of a call, by name, for the options among `names` that were given."""
    found = {name: getattr(args, name) for name in names}
    # Compare by identity, because 0 is a valid value and equals False.
    found = {name: x for name, x in found.items() if x is not None and x is not False}
    return cast("CallArguments[Shaped]", found)


MASK_FLAGS = ("is_causal", "causal_alignment", "local_window_size")


def window(text: str) -> int | tuple[int | None, int | None]:
    """The window that a text expresses: 4 for "4", (4, 0) for "4,0", (4, None) for "4,none"."""
    sides = text.lower().split(",")
    try:
        numbers = [None if x in ("none", "") else int(x) for x in sides]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    raise argparse.ArgumentTypeError(f"expected W or LEFT,RIGHT, got {text!r}")
