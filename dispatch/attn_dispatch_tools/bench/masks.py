"""The masks of the grid "masks".

Imports nothing but the standard library, because torch's process loads this file by its path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Pairs = Any
"""Positions or pairs: an integer, or an array of NumPy, JAX or torch."""


@dataclass(frozen=True)
class Mask:
    """Which keys queries see: those up to their position, minus and plus what the fields say.

    0 stands for a field that a mask does not have.
    """

    window: int = 0
    """The largest number of keys that a query sees, the one at its position included."""
    sinks: int = 0
    """So many first keys are seen from everywhere, whatever the window."""
    chunk: int = 0
    """Only keys of the same chunk of so many positions."""
    documents: int = 0
    """Only keys of the same document, of so many."""
    is_uneven: bool = False
    """Whether documents differ in length."""
    prefix: int = 0
    """So many first keys are seen by all queries, also by those before them."""
    image: int = 0
    """Images of so many tokens, with as much text between them, see all of themselves."""
    has_ends: bool = False
    """Whether the call's arrays hold each query's first key and end, and not the groups' numbers.
    The mask is the same."""

    @property
    def is_plain(self) -> bool:
        """Whether causality and a window are the whole mask."""
        return self in (Mask(), Mask(window=self.window))

    def groups(self, tokens: int) -> list[int]:
        """The number of each position's document or image, counted from 1; 0 for text."""
        if self.image:
            numbers = (t // self.image for t in range(tokens))
            return [x if x % 2 else 0 for x in numbers]
        lengths = self.document_lengths(tokens)
        return [i for i, length in enumerate(lengths, 1) for _ in range(length)]

    def document_lengths(self, tokens: int) -> list[int]:
        """The lengths of the documents. Uneven ones grow from 1 to `documents` parts, mixed."""
        parts = [1] * (self.documents or 1)
        if self.is_uneven:  # 5 is coprime to numbers of documents that are powers of two
            parts = [1 + 5 * i % self.documents for i in range(self.documents)]
        ends = [tokens * sum(parts[:i]) // sum(parts) for i in range(len(parts) + 1)]
        return [ends[i + 1] - ends[i] for i in range(len(parts))]

    def function(self) -> Callable[[Pairs, Pairs, Pairs], Pairs]:
        """Whether the query at t sees the key at s, by t, s and an array of `groups`."""
        window, sinks, chunk, prefix = self.window, self.sinks, self.chunk, self.prefix
        has_documents, has_images = bool(self.documents), bool(self.image)

        def sees(t: Pairs, s: Pairs, groups: Pairs) -> Pairs:
            seen = s <= t
            if window:
                seen = seen & ((t - s < window) | (s < sinks) if sinks else t - s < window)
            if chunk:
                seen = seen & (t // chunk == s // chunk)
            if prefix:
                seen = seen | (s < prefix)
            if has_documents:
                seen = seen & (groups[t] == groups[s])
            if has_images:
                seen = seen | ((groups[t] == groups[s]) & (groups[t] > 0))
            return seen

        return sees
