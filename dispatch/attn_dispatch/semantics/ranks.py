"""Positions inside segments whose places stand in any order: equal ids are one segment."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.semantics.row_ids import search


@dataclass(frozen=True)
class Ranks:
    """Rows of ids, sorted; what `Runs` says of ids that are one run each."""

    ascending: jax.Array
    """int32 [B, L]."""
    rank: jax.Array
    """int32 [B, L]; where each place has gone, equal ids keeping their order."""

    @staticmethod
    def of(ids: jax.Array) -> Ranks:
        order = jnp.argsort(ids, axis=1, stable=True)
        rank = jnp.argsort(order, axis=1).astype(jnp.int32)
        return Ranks(jnp.take_along_axis(ids, order, axis=1), rank)

    def positions(self, ids: jax.Array) -> jax.Array:
        """Of the places of these rows, whose ids are given again: how many before have their id."""
        return self.rank - search(self.ascending, ids, "left")

    def count(self, ids: jax.Array) -> jax.Array:
        """For each id [B, M]: how many places have it."""
        return search(self.ascending, ids, "right") - search(self.ascending, ids, "left")
