"""The mask of a tree of drafted tokens, for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attn_dispatch.call.values import known_values
from attn_dispatch.mods.checks import RowNumber, check_array
from attn_dispatch.programs.functions import MaskMod


def tree_mask(parents: ArrayLike, cache_length: ArrayLike = 0) -> MaskMod:
    """Drafted tokens attend to the cache, their ancestors and themselves (arXiv:2305.09781).

    The queries are the tree's T tokens. The first cache_length keys are the cache, the next T the
    tree's tokens, in the order of the queries; nobody attends to what comes after them.

    Args:
      parents: integers [T], or [B, T] where each batch row has its own tree: the number of the
        token that a token follows, -1 where it follows the cache. Parents stand before their
        children.
      cache_length: an integer, or integers [] or [B], which may be traced, in positions.

    Raises:
      ValueError: a parent is not before its child; parents are looked at unless they are traced or
        in an accelerator's memory.
    """
    table = check_array("parents", parents, "integer", ("T",), ("B", "T"))
    known = known_values(table)
    if known is not None:
        _check_order(known)
    return TreeMask(*_subtrees(table), RowNumber("cache_length", cache_length))


@dataclass(frozen=True, eq=False)
class TreeMask:
    first: jax.Array
    """The first and last number in the subtree of each token, [T] or [B, T]."""
    last: jax.Array
    length: RowNumber

    def __call__(self, b: Any, n: Any, t: Any, s: Any) -> jax.Array:
        def of(numbers: jax.Array, token: Any) -> jax.Array:
            return numbers[b, token] if numbers.ndim == 2 else numbers[token]

        token = s - self.length.of(b)
        query = of(self.first, t)
        is_seen = (of(self.first, token) <= query) & (query <= of(self.last, token))
        return (token < 0) | ((token < self.first.shape[-1]) & is_seen)


def _check_order(parents: np.ndarray) -> None:
    wrong = np.argwhere((parents < -1) | (parents >= np.arange(parents.shape[-1])))
    if wrong.size:
        at = tuple(wrong[0])
        raise ValueError(
            f"parents: expected -1 or an earlier token for each token, got {parents[at]} for token "
            f"{at[-1]}"
        )


def _subtrees(parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and last number in the subtree of each token, if they are numbered depth first.

    Then a token is another one's ancestor, or itself, where the other's number is in its subtree:
    that takes no table of all pairs. int32, of the shape of parents.
    """
    tokens = jnp.arange(parents.shape[-1])
    is_self, is_earlier = (compare(tokens[:, None], tokens) for compare in (jnp.equal, jnp.greater))
    sees = is_self | (parents[..., None] == tokens)
    # Each product goes up twice as many generations.
    for _ in range((len(tokens) - 1).bit_length()):
        numbers = sees.astype(jnp.float32)
        sees = numbers @ numbers > 0
    size = sees.sum(axis=-2, dtype=jnp.int32)
    # Before a token come its ancestors, and the subtrees of those that stand beside one of them, or
    # beside itself, and are earlier.
    is_beside = parents[..., None] == parents[..., None, :]
    step = 1 + _sum(is_beside & is_earlier, size)
    first = _sum(sees, step)
    return first, first + size - 1


def _sum(table: jax.Array, numbers: jax.Array) -> jax.Array:
    """For each row of a bool table, the sum of the numbers where it is True."""
    return jnp.where(table, numbers[..., None, :], 0).sum(axis=-1, dtype=jnp.int32)
