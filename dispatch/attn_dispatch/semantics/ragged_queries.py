"""Queries of sequences that lie one after the other, as a padded batch of them and back."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.semantics.row_ids import ascending, search


@dataclass(frozen=True)
class RaggedQueries:
    """Where the queries of each sequence stand among all of them."""

    starts: jax.Array
    """int32 [B]."""
    lengths: jax.Array
    """int32 [B]; -1, which is wrong and makes NaN, where cu_seqlens are."""
    sequence: jax.Array
    """int32 [tokens], from 0; -1 for what belongs to none."""
    longest: int

    @staticmethod
    def of(cu_seqlens: jax.Array, tokens: int, longest: int) -> RaggedQueries:
        """Of cu_seqlens [B + 1] int32 that ascend from 0 to at most `tokens`."""
        right = ascending(cu_seqlens[None], tokens)[0]
        is_wrong = (right != cu_seqlens).any() | (cu_seqlens[0] != 0)
        lengths = jnp.diff(right)
        wrong = is_wrong | (lengths > longest)
        places = jnp.arange(tokens, dtype=jnp.int32)[None]
        index = search(right[None], places, "right")[0] - 1
        is_of_one = index < right.shape[0] - 1
        # All queries are a sequence's where nobody knows which: they are to be NaN.
        sequence = jnp.where(is_of_one & (index >= 0), index, jnp.where(is_wrong, 0, -1))
        return RaggedQueries(right[:-1], jnp.where(wrong, -1, lengths), sequence, longest)

    def padded(self, x: jax.Array) -> jax.Array:
        """[tokens, ...] as [B, longest, ...]; what is padding is anything."""
        places = self.starts[:, None] + jnp.arange(self.longest, dtype=jnp.int32)[None]
        if not x.shape[0]:  # there is nothing to take
            return jnp.zeros((*places.shape, *x.shape[1:]), x.dtype)
        return jnp.take(x, places, axis=0, mode="clip")

    def packed(self, x: jax.Array, padding: float) -> jax.Array:
        """[B, longest, ...] as [tokens, ...], `padding` where no sequence is."""
        sequence = jnp.maximum(self.sequence, 0)
        tokens = jnp.arange(self.sequence.shape[0], dtype=jnp.int32)
        within = jnp.clip(tokens - self.starts[sequence], 0, self.longest - 1)
        found = x[sequence, within]
        is_of_one = (self.sequence >= 0).reshape(-1, *(1,) * (found.ndim - 1))
        return jnp.where(is_of_one, found, jnp.asarray(padding, x.dtype))
