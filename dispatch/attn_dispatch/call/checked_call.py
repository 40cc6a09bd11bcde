"""A call whose arguments are valid, as the rules about probable mistakes look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.shapes import CallShape
from attn_dispatch.call.static_arguments import Side


@dataclass(frozen=True)
class CheckedCall:
    arguments: Arguments
    """The arguments as the caller gave them, but with query, key and value in the order of
    operands.py."""
    arrays: Mapping[str, jax.Array]
    """The arrays of the call as the caller shaped them, by name."""
    shape: CallShape
    window: tuple[Side, Side]
    longest: tuple[int, int]
    """The largest number of queries and of keys of a sequence."""

    @property
    def has_window(self) -> bool:
        return self.window != (None, None)

    @property
    def is_of_the_past(self) -> bool:
        """Whether causality or the window hides the keys after the diagonal."""
        right = self.window[1]
        return self.arguments.is_causal or (isinstance(right, int) and right == 0)
