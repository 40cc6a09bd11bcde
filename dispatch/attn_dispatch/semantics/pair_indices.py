"""Which pair of a query and a key a mod computes for: b, n, t and s, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec


@dataclass(frozen=True)
class PairIndices:
    """The indices of all pairs; int32, a batch axis of 1 standing for all batch rows."""

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
        """Those of a call; None without mods."""
        if not spec.has("mods_start"):
            return None
        start = operands["mods_start"]
        count = start.shape[0]
        rows = jnp.arange(spec.batch, dtype=jnp.int32)
        heads = jnp.arange(spec.num_heads, dtype=jnp.int32)
        copies = rows // (spec.batch // count)
        b = (rows % (spec.batch // count) + jnp.take(start[:, 0], copies))[:, None]
        if spec.has("cu_seqlens_q"):
            assert query_ids is not None
            b = query_ids - 1
        n = heads + start[:, 1:]
        n = n if count == 1 else jnp.take(n, copies, axis=0)
        return PairIndices(copies, b, n, query_positions, key_positions)

    def part(self, take: Callable[[jax.Array, str], jax.Array]) -> PairIndices:
        """Those of some batch rows, heads and queries."""
        return PairIndices(
            take(self.copies, "b"),
            take(self.b, "bt"),
            take(self.n, "bn"),
            take(self.t, "bt"),
            take(self.s, "bs"),
        )
