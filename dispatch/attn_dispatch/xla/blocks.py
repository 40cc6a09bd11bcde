"""The blocks that a call is computed in: batch rows, kv heads with their query heads, query rows.

A block has all keys, and scores of at most `SCORE_BYTES`. Keys are read once for all query rows of
a block. So blocks shrink to fewer batch rows, and then to fewer heads, before they have few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.divisors import largest_divisor
from attn_dispatch.call.spec import AttentionSpec

SCORE_BYTES = 2**27
"""The most bytes of one block's scores, [B, N, T, S]; a single row may take more."""

ENOUGH_ROWS = 128
"""The least query rows of a block, unless so many of a single kv head do not fit. Then the query
heads that share the kv head give the matrix product enough rows."""


State = TypeVar("State")
Index = jax.Array | int

Results = dict[str, jax.Array]
"""Results or gradients by name, as far as blocks have computed them."""


@dataclass(frozen=True)
class BlockSizes:
    """A block's size along each axis. Only along query rows may the last block be smaller."""

    batch: int
    """Divides B."""
    kv_heads: int
    """Divides K."""
    rows: int

    @staticmethod
    def of(spec: AttentionSpec) -> BlockSizes:
        """The largest blocks whose scores fit in SCORE_BYTES and that have enough rows.

        In an exported module a length may be a symbol; then the whole call is one block.
        """
        if spec.has_symbolic_length:
            return BlockSizes(spec.batch, spec.num_kv_heads, spec.seq_len_q)
        row_bytes = _row_bytes(spec)
        enough = min(ENOUGH_ROWS, spec.seq_len_q)
        kv_heads = spec.num_kv_heads
        batch = spec.batch
        # In an exported module the batch may be a symbol: it is not divided, and counts as one row.
        if isinstance(batch, int):
            batch = largest_divisor(batch, SCORE_BYTES // (kv_heads * enough * row_bytes))
        counted = batch if isinstance(batch, int) else 1
        kv_heads = largest_divisor(kv_heads, SCORE_BYTES // (counted * enough * row_bytes))
        fitting = max(SCORE_BYTES // (counted * kv_heads * row_bytes), 1)
        power = 1 << fitting.bit_length() - 1
        # `enough` itself need not be a power of two.
        rows = max(power, enough) if fitting >= enough else power
        return BlockSizes(batch, kv_heads, min(rows, spec.seq_len_q))

    def score_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of one block's scores; if the batch is a symbol, of one of its rows."""
        batch = self.batch if isinstance(self.batch, int) else 1
        return batch * self.kv_heads * self.rows * _row_bytes(spec)

    def parts(self, spec: AttentionSpec) -> tuple[int, int]:
        """The number of parts of the batch and of the kv heads."""
        batch = 1 if self.batch == spec.batch else spec.batch // self.batch
        return batch, spec.num_kv_heads // self.kv_heads

    def describe(self, spec: AttentionSpec) -> str:
        """The blocks in words, for `explain`."""
        chunks = -(-spec.seq_len_q // self.rows)
        parts = prod(self.parts(spec))
        if chunks == parts == 1:
            return "dense"
        text = f"{chunks} x {self.rows} query rows"
        if parts == 1:
            return text
        heads = self.kv_heads * (spec.num_heads // spec.num_kv_heads)
        return f"{text}, in {parts} parts of {self.batch} batch rows, {heads} heads"


@dataclass(frozen=True)
class Block:
    """One block of a call. Axes of arrays are letters: b batch, n heads, k kv heads, t query rows.

    Any other letter is an axis that blocks do not divide. All blocks share an axis of length 1.
    """

    starts: dict[str, Index]
    sizes: dict[str, int]

    def take(self, x: jax.Array, axes: str) -> jax.Array:
        """The part of x that belongs to this block."""
        if all(self._is_whole(n, axis) for n, axis in zip(x.shape, axes, strict=False)):
            return x
        divided = [
            n if self._is_whole(n, axis) else self.sizes[axis]
            for n, axis in zip(x.shape, axes, strict=False)
        ]
        sizes = (*divided, *x.shape[len(axes) :])
        if x.dtype.itemsize != 2:
            return lax.dynamic_slice(x, self._starts(x, axes), sizes)
        # As integers: on the CPU, XLA would slice a float32 copy of the whole 16-bit array.
        words = lax.bitcast_convert_type(x, jnp.uint16)
        part = lax.dynamic_slice(words, self._starts(x, axes), sizes)
        return lax.bitcast_convert_type(part, x.dtype)

    def put(self, x: jax.Array, part: jax.Array, axes: str) -> jax.Array:
        """x with this block's part of it replaced."""
        return lax.dynamic_update_slice(x, part.astype(x.dtype), self._starts(x, axes))

    def add(self, x: jax.Array, part: jax.Array, axes: str) -> jax.Array:
        """x with `part` added to this block's part of it."""
        return self.put(x, self.take(x, axes) + part, axes)

    def _starts(self, x: jax.Array, axes: str) -> tuple[Index, ...]:
        starts = [
            0 if self._is_whole(n, axis) else self.starts[axis]
            for n, axis in zip(x.shape, axes, strict=False)
        ]
        starts += [0] * (x.ndim - len(axes))
        if all(isinstance(start, int) for start in starts):
            return tuple(starts)
        return tuple(jnp.asarray(start, jnp.int32) for start in starts)  # not 64 bits under x64

    def _is_whole(self, length: int, axis: str) -> bool:
        return axis not in self.sizes or length in (1, self.sizes[axis])


def for_each_block(
    step: Callable[[Block, State], State],
    state: State,
    spec: AttentionSpec,
    sizes: BlockSizes,
    *,
    batch_is_inner: bool = False,
) -> State:
    """step(block, state) for every block in turn: all parts of some query rows, then the next rows.

    The parts of the batch come first within those of the heads, or the other way round.
    """
    parts = dict(zip("bk", sizes.parts(spec), strict=True))
    order = ("k", "b") if batch_is_inner else ("b", "k")
    whole, rest = divmod(spec.seq_len_q, sizes.rows)
    group = spec.num_heads // spec.num_kv_heads

    def block(first_row: int, rows: int, index: Index) -> Block:
        at: dict[str, Index] = {}
        for axis in reversed(order):
            at[axis], index = _split(index, parts[axis])
        starts = {
            "b": at["b"] * sizes.batch if parts["b"] > 1 else 0,
            "k": at["k"] * sizes.kv_heads,
            "n": at["k"] * sizes.kv_heads * group,
            "t": first_row + index * rows,
        }
        heads = {"k": sizes.kv_heads, "n": sizes.kv_heads * group}
        return Block(starts, {"b": sizes.batch, "t": rows} | heads)

    def loop(state: State, first_row: int, rows: int, chunks: int) -> State:
        count = chunks * prod(parts.values())
        if count == 1:
            return step(block(first_row, rows, 0), state)

        def next_block(
            carry: tuple[jax.Array, State], _: None
        ) -> tuple[tuple[jax.Array, State], None]:
            index, state = carry
            return (index + jnp.int32(1), step(block(first_row, rows, index), state)), None

        # Like lax.fori_loop, whose index would have 64 bits under x64.
        (_, state), _ = lax.scan(next_block, (jnp.int32(0), state), length=count)
        return state

    state = loop(state, 0, sizes.rows, whole)
    return loop(state, whole * sizes.rows, rest, 1) if rest else state


def _split(index: Index, count: int) -> tuple[Index, Index]:
    """(index % count, index // count)."""
    if count == 1:
        return 0, index
    return lax.rem(index, jnp.int32(count)), lax.div(index, jnp.int32(count))


def _row_bytes(spec: AttentionSpec) -> int:
    """Bytes of the scores of one query row of one kv head, in all query heads that share it."""
    group = spec.num_heads // spec.num_kv_heads
    return group * spec.seq_len_kv * jnp.dtype(spec.lse_dtype).itemsize
