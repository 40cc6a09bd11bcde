"""The mask of a tree of draft tokens, for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.mod_facts import ModFacts
from attn_dispatch.call.values import known_values
from attn_dispatch.mods.checks import Numbers, RowNumber, check_array, sizes
from attn_dispatch.programs.functions import MaskMod


def tree_mask(parents: Numbers, cache_length: Numbers = 0) -> MaskMod:
    """Draft tokens attend to the cache, their ancestors and themselves (arXiv:2305.09781).

    The queries are the tree's T tokens. The first cache_length keys are the cache; the next T are
    the tree's tokens, in the order of the queries. No query attends to later keys.

    Args:
      parents: integers [T], or [B, T] with a tree for each batch row: the index of the token that a
        token follows, or -1 if it follows the cache. Parents come before their children.
      cache_length: an integer, or integers [] or [B], which may be traced; in positions.

    Raises:
      ValueError: a parent does not come before its child. Parents are not checked if they are
        traced or in an accelerator's memory.
    """
    table = check_array("parents", parents, "integer", ("T",), ("B", "T"))
    known = known_values(table)
    if known is not None:
        _check_order(known)
    return TreeMask(*_subtrees(table), RowNumber("cache_length", cache_length))


@dataclass(frozen=True, eq=False)
class TreeMask:
    first: jax.Array
    """The first and last number in each token's subtree, [T] or [B, T]."""
    last: jax.Array
    length: RowNumber

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        def of(numbers: jax.Array, token: jax.Array) -> jax.Array:
            return numbers[b, token] if numbers.ndim == 2 else numbers[token]

        token = s - self.length.of(b)
        query = of(self.first, t)
        is_seen = (of(self.first, token) <= query) & (query <= of(self.last, token))
        return (token < 0) | ((token < self.first.shape[-1]) & is_seen)

    @property
    def facts(self) -> ModFacts:
        axes = "BT" if self.first.ndim == 2 else "T"
        return ModFacts((*sizes("parents", axes, self.first), *self.length.sizes))


def _check_order(parents: np.ndarray) -> None:
    wrong = np.argwhere(np.less(parents, -1) | np.greater_equal(parents, range(parents.shape[-1])))
    if wrong.size:
        at = tuple(map(int, wrong[0]))
        raise ValueError(
            f"parents: expected -1 or an earlier token for each token, got {parents[at]} for token "
            f"{at[-1]}"
        )


def _subtrees(parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and last number in each token's subtree, with tokens numbered depth first.

    A token is another's ancestor, or the same token, if the other's number is in its subtree: no
    table of all pairs is needed. int32, in the shape of parents.
    """
    tokens = jnp.arange(parents.shape[-1])
    is_self, is_earlier = (compare(tokens[:, None], tokens) for compare in (jnp.equal, jnp.greater))
    sees = is_self | (parents[..., None] == tokens)
    # Each product doubles the number of generations covered.
    for _ in range((len(tokens) - 1).bit_length()):
        numbers = sees.astype(jnp.float32)
        sees = numbers @ numbers > 0
    size = sees.sum(axis=-2, dtype=jnp.int32)
    # Before a token come its ancestors, and the subtrees of earlier siblings of the token and of
    # its ancestors.
    is_sibling = parents[..., None] == parents[..., None, :]
    step = 1 + _sum(is_sibling & is_earlier, size)
    first = _sum(sees, step)
    return first, first + size - 1


def _sum(table: jax.Array, numbers: jax.Array) -> jax.Array:
    """For each row of a bool table, the sum of the numbers where it is True."""
    return jnp.where(table, numbers[..., None, :], 0).sum(axis=-1, dtype=jnp.int32)
