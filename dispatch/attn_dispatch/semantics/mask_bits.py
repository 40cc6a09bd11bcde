"""The mask of a call as one bit a pair, for masks that are not known to be intervals of keys.

Bits are uint32 [1|B, 1|N, T, W]: key s of a query is bit s % 32 of word s // 32. Bits past the last
key are 0. Padding queries, and those of invalid rows (invalid_values.py), have none. Kernels
compute the tiles of pairs with some bit, which are found from the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.program import axes_of
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.semantics.tile_bits import BITS, packed
from attn_dispatch.semantics.tile_lists import TileGrid, TileLists, lists_of_tiles
from attn_dispatch.typed_jax import mapped

_NONE, _ALL = np.uint32(0), np.uint32(2**BITS - 1)
_BLOCK_PAIRS = 2**26
"""The most pairs whose mask is computed at once, unless one row of all heads has more."""


def mask_bits(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The bits of a call that has a mask, made for blocks of queries."""
    batch, heads, queries, words = bits_shape(spec)
    positions = _shared(spec, Positions.of(spec, operands))
    rows = min(max(_BLOCK_PAIRS // (batch * heads * spec.seq_len_kv), 1), queries)

    def of_block(number: jax.Array) -> jax.Array:
        # The last block begins before its place, so that all its queries exist.
        begin = jnp.minimum(number * rows, queries - rows)

        def take(x: jax.Array, axes: str) -> jax.Array:
            is_cut = axes.endswith("t") and x.shape[1] != 1
            return lax.dynamic_slice_in_dim(x, begin, rows, axis=1) if is_cut else x

        taken = dict(operands)
        if spec.has("mask") and spec.shape("mask")[2] != 1:
            taken["mask"] = lax.dynamic_slice_in_dim(operands["mask"], begin, rows, axis=2)
        seen = allowed(spec, taken, positions.part(take))
        assert seen is not None  # else the mask is known to be intervals
        return _packed(jnp.broadcast_to(seen, (batch, heads, rows, spec.seq_len_kv)), words)

    count = -(-queries // rows)
    if count == 1:
        return of_block(jnp.int32(0))
    found = jnp.moveaxis(mapped(of_block, jnp.arange(count, dtype=jnp.int32)), 0, 2)
    found = found.reshape(batch, heads, count * rows, words)
    last = queries - (count - 1) * rows
    return jnp.concatenate([found[:, :, : (count - 1) * rows], found[:, :, -last:]], axis=2)


def bits_shape(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """The shape of `mask_bits`."""
    batch = spec.batch if _differs_by_row(spec) else 1
    heads = spec.num_heads if _differs_by_head(spec) else 1
    return batch, heads, spec.seq_len_q, -(-spec.seq_len_kv // BITS)


def bits_bytes(spec: AttentionSpec) -> int:
    """Bytes of `mask_bits`; of one batch row where the batch is a symbol."""
    return 4 * prod(x if isinstance(x, int) else 1 for x in bits_shape(spec))


def attends(bits: jax.Array) -> jax.Array:
    """bool [1|B, 1|N, T]: the query sees some key."""
    return (bits != 0).any(axis=3)


def seen_keys(bits: jax.Array, keys: int) -> jax.Array:
    """bool [1|B, S]: some query of some head sees the key."""
    words = lax.reduce(bits, np.uint32(0), lax.bitwise_or, (1, 2))
    places = lax.broadcasted_iota(jnp.uint32, (1, 1, BITS), 2)
    return ((words[:, :, None] >> places) & 1 > 0).reshape(words.shape[0], -1)[:, :keys]


def _differs_by_row(spec: AttentionSpec) -> bool:
    if spec.has_runtime_lengths or spec.has("window"):
        return True
    if any(spec.has(x) and spec.shape(x)[0] != 1 for x in ("mask", "causal_offset")):
        return True
    program = spec.meaning.mask_mod
    return program is not None and ("b" in axes_of(program) or spec.shape("mods_start")[0] != 1)


def _differs_by_head(spec: AttentionSpec) -> bool:
    if spec.has("mask") and spec.shape("mask")[1] != 1:
        return True
    program = spec.meaning.mask_mod
    return program is not None and "n" in axes_of(program)


def _shared(spec: AttentionSpec, positions: Positions) -> Positions:
    """The positions of one batch row, and of one head, where all have the same mask."""

    def part(x: jax.Array, axes: str) -> jax.Array:
        if not _differs_by_row(spec):
            x = x[:1]
        return x[:, :1] if axes.endswith("n") and not _differs_by_head(spec) else x

    return positions.part(part)


def _packed(seen: jax.Array, words: int) -> jax.Array:
    """The words of pairs, bool [..., S]."""
    padding = [(0, 0)] * (seen.ndim - 1) + [(0, words * BITS - seen.shape[-1])]
    return packed(jnp.pad(seen, padding))


def bit_lists(bits: jax.Array, grid: TileGrid, *, is_backward: bool) -> TileLists:
    """The lists of a mask, uint32 [1|B, 1|N, T, W], as in `forward_lists` and `backward_lists`.

    The grid has no band.
    """
    batch, heads, _, _ = bits.shape
    some, every = (x.reshape(batch * heads, *x.shape[2:]) for x in _seen(bits, grid))
    if is_backward:
        some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
    made = lists_of_tiles(some, every).arrays
    return TileLists(*(x.reshape(batch, heads, *x.shape[2:]) for x in made))


def _seen(bits: jax.Array, grid: TileGrid) -> tuple[jax.Array, jax.Array]:
    """Whether some, and whether all, pairs of a tile are seen, bool [1|B, 1|N, query tiles, key
    tiles]. Only the first step, over the queries of a tile, reads all bits."""
    batch, heads, queries, count = bits.shape
    # Repeated, the last query alters neither.
    padding = grid.query_tiles * grid.tile.queries - queries
    rows = jnp.pad(bits, ((0, 0), (0, 0), (0, padding), (0, 0)), mode="edge")
    rows = rows.reshape(batch, heads, grid.query_tiles, grid.tile.queries, count)
    union = lax.reduce(rows, _NONE, lax.bitwise_or, (3,))
    intersection = lax.reduce(rows, _ALL, lax.bitwise_and, (3,))
    words, wanted = _words(grid)
    wanted = wanted[None, None, None]
    some = (union[..., words] & wanted) != 0
    every = (intersection[..., words] | ~wanted) == _ALL
    return some.any(axis=-1), every.all(axis=-1)


def _words(grid: TileGrid) -> tuple[np.ndarray, np.ndarray]:
    """The words that have keys of each tile, and which of their bits these are: [key tiles, W]."""
    begin = np.arange(grid.key_tiles)[:, None] * grid.tile.keys
    end = np.minimum(begin + grid.tile.keys, grid.keys)
    most = (grid.tile.keys - 2) // BITS + 2 if grid.tile.keys % BITS else grid.tile.keys // BITS
    word = begin // BITS + np.arange(most)
    key = word[..., None] * BITS + np.arange(BITS)
    is_of_tile = (key >= begin[..., None]) & (key < end[..., None])
    wanted = (is_of_tile << np.arange(BITS, dtype=np.uint64)).sum(axis=-1).astype(np.uint32)
    last = -(-grid.keys // BITS) - 1
    return np.minimum(word, last), wanted
