"""What ready-made mods say of themselves, and the check that their arrays fit the call.

A mod looks up its arrays by b, n, t and s, and JAX clamps an index past the end: an array of
another size would give wrong rows instead of an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import jax

from attn_dispatch.call.shapes import CallShape

_AXES = {"B": "batch rows", "N": "query heads", "T": "queries", "S": "keys"}
_LENGTHS = ("T", "S")


@dataclass(frozen=True)
class Size:
    """The size of a mod along an axis of the call, which is to be the call's."""

    argument: str
    axis: str
    """"B" for batch rows, "N" for query heads, "T" for queries, "S" for keys."""
    size: int
    is_most: bool = False
    """Whether the call may also be shorter."""


@dataclass(frozen=True)
class ModFacts:
    sizes: tuple[Size, ...] = ()
    sees_ahead: str | None = None
    """The name of a mod that is causal, except that it shows some keys after the query."""

    @staticmethod
    def of(*mods: object) -> ModFacts:
        """The facts of ready-made mods together; of the caller's own functions none are known."""
        given = (getattr(x, "facts", None) for x in mods)
        each = [x for x in given if isinstance(x, ModFacts)]
        ahead = (x.sees_ahead for x in each if x.sees_ahead is not None)
        return ModFacts(tuple(y for x in each for y in x.sizes), next(ahead, None))

    def from_offset(self) -> ModFacts:
        """The facts of the same mod if queries do not begin at position 0."""
        sizes = (replace(x, is_most=True) if x.axis in _LENGTHS else x for x in self.sizes)
        return replace(self, sizes=tuple(sizes))


def sizes_for_mods(shape: CallShape, arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """The sizes of a call along the axes that mods count, where they are known.

    Args:
      shape: the call's, with the queries and keys of all devices.
      arrays: the call's arrays, by name.
    """
    sizes = {"B": prod(shape.leading), "N": shape.num_heads}
    if "cu_seqlens_q" in arrays:  # b is the number of the sequence
        sizes["B"] = arrays["cu_seqlens_q"].shape[0] - 1
    elif "query_segment_ids" not in arrays:  # within segments t and s begin again
        sizes |= {"T": shape.seq_len_q, "S": shape.seq_len_kv}
    # The size of a symbol of jax.export is not known.
    return {axis: size for axis, size in sizes.items() if isinstance(size, int)}


def check_mod(mod: object, sizes: Mapping[str, int]) -> None:
    """Check that a ready-made mod fits a call of these sizes.

    Raises:
      ValueError: a size of the mod is another than the call's.
    """
    for x in ModFacts.of(mod).sizes:
        expected = sizes.get(x.axis)
        if expected is None or not isinstance(x.size, int):
            continue
        if x.size != expected and not (x.is_most and x.size > expected):
            least = " or more" if x.is_most else ""
            raise ValueError(
                f"{x.argument}: expected {expected}{least} {_AXES[x.axis]}, as the call has, got "
                f"{x.size}"
            )
