"""What a score_mod or a mask_mod computes of one pair of a query and a key."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr

INDICES = ("b", "n", "t", "s")
"""Batch row, head, and the positions of query and key inside their sequences; int32 scalars."""


@dataclass(frozen=True)
class Program:
    """A function of scalars, traced. Two are equal where they compute the same in the same way.

    Its inputs: of a score_mod first the score; then b, n, t, s; then the arrays that it was given
    or has captured, whole.
    """

    text: str
    """Every operation of it, and of its derivative if it has one, without names or addresses: what
    equality, hashes and JAX's caches go by."""
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype name of each array."""
    jaxpr: ClosedJaxpr = field(compare=False, repr=False)
    """As the user's function was traced, its own derivative rules among it."""
    body: ClosedJaxpr = field(compare=False, repr=False)
    """The same in plain operations, without calls and what has no effect on the result."""

    def __str__(self) -> str:
        return " ".join(str(self.body.jaxpr).split())
