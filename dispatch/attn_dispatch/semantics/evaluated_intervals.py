"""The intervals of a mask that only its pairs tell: it is evaluated for blocks of queries.

Memory is that of one block. Where a static band holds the mask, a block takes the keys of its band
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.program import axes_of
from attn_dispatch.semantics.interval_union import MOST_INTERVALS
from attn_dispatch.semantics.key_bands import KeyBand
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.typed_jax import mapped

_BLOCK_PAIRS = 2**24
"""The most pairs of a block, unless one row of the mask has more."""

_ENOUGH_ROWS = 128
"""The most rows of a block whose keys follow a band: it takes as many further keys."""


def evaluated(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The mask's rows [1|B, T, 4] in normal form, and whether some row has more intervals.

    Of a row with more, they are the first and the last one.
    """
    blocks = _Blocks.of(spec)
    positions = _prepared(spec, Positions.of(spec, operands), blocks.padding)

    def of_block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        begin = index * blocks.rows
        first_key = blocks.first_key(begin)

        def take(x: jax.Array, axes: str) -> jax.Array:
            if len(axes) < 2 or axes[1] not in "ts" or x.shape[1] == 1:
                return x
            start, size = (begin, blocks.rows) if axes[1] == "t" else (first_key, blocks.keys)
            return lax.dynamic_slice_in_dim(x, start, size, axis=1)

        may_attend = allowed(spec, operands, positions.part(take))
        assert may_attend is not None
        shape = (may_attend.shape[0], blocks.rows, blocks.keys)
        return _runs(jnp.broadcast_to(may_attend[:, 0], shape), first_key)

    rows, counts = mapped(of_block, jnp.arange(blocks.count, dtype=jnp.int32))
    # [blocks, 1|B, rows, 4] to [1|B, T, 4].
    rows = jnp.moveaxis(rows, 0, 1).reshape(rows.shape[1], -1, rows.shape[3])
    counts = jnp.moveaxis(counts, 0, 1).reshape(counts.shape[1], -1)
    is_unknown = (counts[:, : spec.seq_len_q] > MOST_INTERVALS).any()
    return rows[:, : spec.seq_len_q], is_unknown


def evaluated_pairs(spec: AttentionSpec) -> int:
    """The number of pairs that `evaluated` computes."""
    blocks = _Blocks.of(spec)
    return _batch(spec) * blocks.count * blocks.rows * blocks.keys


@dataclass(frozen=True)
class _Blocks:
    """Blocks of so many queries and keys."""

    count: int
    rows: int
    keys: int
    low: int
    """The first key of a block is so far from its first query, if not all keys are taken."""
    all_keys: int
    padding: int
    """The number of rows of the last block that are past the last query."""

    @staticmethod
    def of(spec: AttentionSpec) -> _Blocks:
        queries, keys = spec.seq_len_q, spec.seq_len_kv
        band, low = KeyBand.of(spec), 0
        rows = min(max(_BLOCK_PAIRS // (_batch(spec) * keys), 1), queries)
        if band.width is not None and band.low is not None:
            fewer = min(rows, max(band.width, _ENOUGH_ROWS))
            if fewer + band.width < keys:
                rows, keys, low = fewer, max(fewer + band.width - 1, 1), band.low
        count = -(-queries // rows)
        return _Blocks(count, rows, keys, low, spec.seq_len_kv, count * rows - queries)

    def first_key(self, first_query: jax.Array) -> jax.Array:
        return jnp.clip(first_query + self.low, 0, self.all_keys - self.keys)


def _batch(spec: AttentionSpec) -> int:
    """The length of the mask's batch axis. Where the batch is a symbol, one row is counted."""
    return spec.batch if isinstance(spec.batch, int) and not _is_shared(spec) else 1


def _is_shared(spec: AttentionSpec) -> bool:
    """Whether all batch rows have the same mask."""
    program = spec.meaning.mask_mod
    if program is None or "b" in axes_of(program) or spec.shape("mods_start")[0] > 1:
        return False
    return not spec.has_runtime_lengths and not spec.has("window")


def _prepared(spec: AttentionSpec, positions: Positions, padding: int) -> Positions:
    """The positions of one head, and of one batch row if all are alike, with further queries that
    may see any keys."""

    def prepare(x: jax.Array, axes: str) -> jax.Array:
        if axes[0] == "b" and _is_shared(spec):
            x = x[:1]
        if axes.endswith("n"):
            return x[:, :1]
        if axes.endswith("t") and x.shape[1] == spec.seq_len_q:
            return jnp.pad(x, ((0, 0), (0, padding)))
        return x

    return positions.part(prepare)


def _runs(may_attend: jax.Array, first_key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows [1|B, R, 4] of a block of the mask, bool [1|B, R, L], and their numbers of runs."""
    far = jnp.iinfo(jnp.int32).max
    keys = first_key + lax.broadcasted_iota(jnp.int32, (1, 1, may_attend.shape[2]), 2)
    before = jnp.pad(may_attend, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    after = jnp.pad(may_attend, ((0, 0), (0, 0), (0, 1)))[..., 1:]
    is_first, is_last = may_attend & ~before, may_attend & ~after
    count = is_first.sum(axis=2, dtype=jnp.int32)
    begins = [jnp.where(is_first, keys, far).min(axis=2), jnp.where(is_first, keys, -1).max(axis=2)]
    ends = [jnp.where(is_last, keys, far).min(axis=2), jnp.where(is_last, keys, -1).max(axis=2)]
    parts: list[jax.Array] = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        is_there = count > number
        parts += [jnp.where(is_there, begin, 0), jnp.where(is_there, end + 1 - begin, 0)]
    return jnp.stack(parts, axis=-1), count
