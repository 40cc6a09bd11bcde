"""Ready-made mask_mods.

They divide and look up by t alone or by s alone, never by both. XLA then computes these few numbers
beforehand, and leaves only sums and comparisons for each pair, which kernels can compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_dispatch.call.mod_facts import ModFacts, Size
from attn_dispatch.call.values import known_values
from attn_dispatch.mods.checks import Numbers, RowNumber, check_array, check_int, sizes
from attn_dispatch.programs.functions import MaskMod


def prefix_lm(prefix_lengths: Numbers) -> MaskMod:
    """Causal, except that all queries attend to the whole prefix (arXiv:1910.10683, section 3.2.1).

    Args:
      prefix_lengths: integers [B], the number of keys in each row's prefix; or an int or integer
        array [], the same in every row.
    """
    return PrefixLM(RowNumber("prefix_lengths", prefix_lengths))


@dataclass(frozen=True, eq=False)
class PrefixLM:
    prefix_lengths: RowNumber

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        return (s <= t) | (s < self.prefix_lengths.of(b))

    @property
    def facts(self) -> ModFacts:
        return ModFacts(self.prefix_lengths.sizes, sees_ahead="prefix_lm")


def document_mask(query_documents: Numbers, key_documents: Numbers | None = None) -> MaskMod:
    """Queries attend to the keys of their own document.

    Unlike with segment ids, any number is a document, none is padding, and positions count along
    the whole row. If that makes no difference to you, pass `query_segment_ids` instead: kernels
    then skip the pairs between segments.

    Args:
      query_documents: integers [B, T], of a call without segment ids.
      key_documents: integers [B, S]; None if they equal query_documents, which needs T == S.
    """
    queries = check_array("query_documents", query_documents, "integer", ("B", "T"))
    keys = queries
    if key_documents is not None:
        keys = check_array("key_documents", key_documents, "integer", ("B", "S"))
    if len(keys) != len(queries):
        raise ValueError(
            f"key_documents: expected {len(queries)} batch rows, as query_documents has, got "
            f"{len(keys)}"
        )
    return DocumentMask(queries, keys)


@dataclass(frozen=True, eq=False)
class DocumentMask:
    queries: jax.Array
    keys: jax.Array

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        return self.queries[b, t] == self.keys[b, s]

    @property
    def facts(self) -> ModFacts:
        name = "query_documents" if self.keys is self.queries else "key_documents"
        of_queries = sizes("query_documents", "BT", self.queries)
        return ModFacts((*of_queries, Size(name, "S", self.keys.shape[1])))


def dilated_window(left: int, dilation: int) -> MaskMod:
    """Attend to keys at t, t - dilation, t - 2 · dilation, …, down to t - left.

    This is Longformer's dilated window, but causal (arXiv:2004.05150, section 3.1).

    Args:
      left: static, in positions, inclusive, as in `local_window_size`.
      dilation: static, in positions, from one key to the next; 1 is a plain window.
    """
    return DilatedWindow(check_int("left", left, 0), check_int("dilation", dilation, 1))


@dataclass(frozen=True, eq=False)
class DilatedWindow:
    left: int
    dilation: int

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        is_in_step = _divided(t, self.dilation)[1] == _divided(s, self.dilation)[1]
        return (s <= t) & (s >= t - self.left) & is_in_step


def chunked_window(chunk: int) -> MaskMod:
    """Causal within chunks of equal length; no key outside the query's chunk.

    Llama 4's local layers use it (github.com/meta-llama/llama-models, models/llama4/model.py).

    Args:
      chunk: static, in positions; chunks begin at 0, chunk, 2 · chunk, …
    """
    return ChunkedWindow(check_int("chunk", chunk, 1))


@dataclass(frozen=True, eq=False)
class ChunkedWindow:
    chunk: int

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        _, since_begin = _divided(t, self.chunk)
        return (s <= t) & (s >= t - since_begin)


def neighborhood_2d(height: int, width: int, radius: int) -> MaskMod:
    """Pixels attend to the square of pixels around them (arXiv:2204.07143, section 3.1).

    At a border the square moves inward, so that every query sees (2 · radius + 1)² keys.

    Args:
      height: static; the height of a grid whose pixels are both queries and keys, row after row:
        T = S = height · width.
      width: static; the width of the grid.
      radius: static, in pixels.

    Raises:
      ValueError: the square is larger than the grid.
    """
    height, width = check_int("height", height, 1), check_int("width", width, 1)
    radius = check_int("radius", radius, 0)
    side = 2 * radius + 1
    if side > min(height, width):
        raise ValueError(
            f"radius: expected a square of {side} x {side} that fits the grid, got {height} x "
            f"{width}"
        )
    return Neighborhood2D(height, width, radius)


@dataclass(frozen=True, eq=False)
class Neighborhood2D:
    height: int
    width: int
    radius: int

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        query_row, query_column = _divided(t, self.width)
        key_row, key_column = _divided(s, self.width)
        is_in_rows = self._is_near(query_row, key_row, self.height)
        return is_in_rows & self._is_near(query_column, key_column, self.width)

    @property
    def facts(self) -> ModFacts:
        pixels = self.height * self.width
        return ModFacts(tuple(Size("height · width", axis, pixels) for axis in "TS"))

    def _is_near(self, query: jax.Array, key: jax.Array, length: int) -> jax.Array:
        centre = jnp.clip(query, self.radius, length - 1 - self.radius)
        return jnp.abs(key - centre) <= self.radius


def _divided(position: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of a position. It is not negative, so each is a single operation."""
    position = jnp.asarray(position)
    number = position.dtype.type(by)
    return lax.div(position, number), lax.rem(position, number)


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
