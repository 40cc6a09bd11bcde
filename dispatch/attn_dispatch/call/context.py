"""How one sequence is spread over devices: the names of the strategies, and a call's placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["gather", "ring", "halo", "keys", "pages"]
"""How devices exchange keys; "keys" and "pages": not at all, they merge results."""
SequenceOrder = Literal["contiguous", "zigzag", "documents"]


@dataclass(frozen=True)
class Context:
    """How the rows and keys of a call are spread along manual mesh axes."""

    axes: tuple[str, ...]
    """The mesh axes; the first varies slowest."""
    devices: int
    """The number of devices along them."""
    order: SequenceOrder = "contiguous"
    """"contiguous": device r has the r-th part of the rows. "zigzag": of 2 · devices equal chunks,
    it has chunks r and 2 · devices - 1 - r, in this order. "documents": of each document it has
    those chunks, next to each other; all devices have the documents in the same order."""
    strategy: Strategy | None = None
    """How the devices exchange keys; None in a call as it was made, where the setting
    `context_parallel` decides."""
