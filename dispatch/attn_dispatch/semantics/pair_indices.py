"""The indices b, n, t and s of the pairs that a mod computes for, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec


@dataclass(frozen=True)
class PairIndices:
    """The indices of all pairs, int32. A batch axis of 1 stands for all batch rows."""

    copies: jax.Array
    """[B]: which row of a mod's arrays belongs to a batch row."""
    b: jax.Array
    """[B, 1]: counted among the batch rows of one copy. [B, T] with cu_seqlens: the sequence."""
    n: jax.Array
    """[1|B, N]."""
    t: jax.Array
    """[1|B, T]: inside the sequence."""
    s: jax.Array
    """[1|B, S]: inside the sequence."""

    @staticmethod
    def of(
        spec: AttentionSpec,
        operands: Mapping[str, jax.Array],
        query_positions: jax.Array,
        key_positions: jax.Array,
        query_ids: jax.Array | None = None,
    ) -> PairIndices | None:
        """The indices of a call; None without mods."""
        if not spec.has("mods_start"):
            return None
        copies, b, n = _rows_and_heads(spec, operands)
        if spec.has("cu_seqlens_q"):
            assert query_ids is not None
            b = query_ids - 1
        return PairIndices(copies, b, n, query_positions, key_positions)

    @staticmethod
    def of_sequences(
        spec: AttentionSpec,
        operands: Mapping[str, jax.Array],
        *,
        sequences: int,
        queries: tuple[int, int],
        keys: int,
    ) -> PairIndices:
        """The indices for a kernel that takes each sequence as a batch row.

        Args:
          sequences: the number of sequences in a batch row of the call.
          queries: t of the first query, and the number of queries.
          keys: the number of keys.
        """
        copies, b, n = _rows_and_heads(spec, operands)
        b = jnp.repeat(b, sequences, axis=0)
        if spec.has("cu_seqlens_q"):
            b = jnp.tile(jnp.arange(sequences, dtype=jnp.int32), spec.batch)[:, None]
        first, count = queries
        t = first + jnp.arange(count, dtype=jnp.int32)[None, :]
        s = jnp.arange(keys, dtype=jnp.int32)[None, :]
        if n.shape[0] > 1:
            n = jnp.repeat(n, sequences, axis=0)
        return PairIndices(jnp.repeat(copies, sequences), b, n, t, s)

    def part(self, take: Callable[[jax.Array, str], jax.Array]) -> PairIndices:
        """The indices of one block of batch rows, heads and queries."""
        return PairIndices(
            take(self.copies, "b"),
            take(self.b, "bt"),
            take(self.n, "bn"),
            take(self.t, "bt"),
            take(self.s, "bs"),
        )


def _rows_and_heads(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each batch row: which copy of the arrays it reads [B], b [B, 1] and n [1|B, N]."""
    start = operands["mods_start"]
    count = start.shape[0]
    n = lax.broadcasted_iota(jnp.int32, (1, spec.num_heads), 1) + start[:, 1:]
    if count == 1:
        b = lax.broadcasted_iota(jnp.int32, (spec.batch, 1), 0) + start[:, :1]
        return jnp.zeros(spec.batch, jnp.int32), b, n
    rows = jnp.arange(spec.batch, dtype=jnp.int32)
    copies = rows // (spec.batch // count)
    b = (rows % (spec.batch // count) + jnp.take(start[:, 0], copies))[:, None]
    return copies, b, jnp.take(n, copies, axis=0)
