"""Positions inside segments whose places may stand in any order: equal ids are one segment."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.semantics.row_ids import search


@dataclass(frozen=True)
class Ranks:
    """Rows of ids, sorted. `Runs` does the same for ids whose places are one run."""

    ascending: jax.Array
    """int32 [B, L]: the sorted ids."""
    rank: jax.Array
    """int32 [B, L]: where sorting puts each place; equal ids keep their order."""

    @staticmethod
    def of(ids: jax.Array) -> Ranks:
        order = jnp.argsort(ids, axis=1, stable=True)
        rank = jnp.argsort(order, axis=1).astype(jnp.int32)
        return Ranks(jnp.take_along_axis(ids, order, axis=1), rank)

    def positions(self, ids: jax.Array) -> jax.Array:
        """int32 [B, L]: how many earlier places have the same id. `ids` are the same as in `of`."""
        return self.rank - search(self.ascending, ids, "left")

    def count(self, ids: jax.Array) -> jax.Array:
        """The number of places of each id [B, M]."""
        return search(self.ascending, ids, "right") - search(self.ascending, ids, "left")
