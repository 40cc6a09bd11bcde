"""Ragged queries, whose sequences lie end to end, to a padded batch and back."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.semantics.row_ids import ascending, search


@dataclass(frozen=True)
class RaggedQueries:
    """The place of each sequence's queries among all queries."""

    starts: jax.Array
    """int32 [B]."""
    lengths: jax.Array
    """int32 [B]; -1, an invalid length that makes NaN, where cu_seqlens are invalid."""
    sequence: jax.Array
    """int32 [tokens]: the sequence of each token, from 0; -1 for none."""
    longest: int

    @staticmethod
    def of(cu_seqlens: jax.Array, tokens: int, longest: int) -> RaggedQueries:
        """From cu_seqlens [B + 1] int32, which should ascend from 0 to at most `tokens`."""
        repaired = ascending(cu_seqlens[None], tokens)[0]
        is_invalid = (repaired != cu_seqlens).any() | (cu_seqlens[0] != 0)
        lengths = jnp.diff(repaired)
        is_invalid_row = is_invalid | (lengths > longest)
        places = jnp.arange(tokens, dtype=jnp.int32)[None]
        index = search(repaired[None], places, "right")[0] - 1
        has_sequence = index < repaired.shape[0] - 1
        # With invalid cu_seqlens every token is given to a sequence, so that all of them are NaN.
        sequence = jnp.where(has_sequence & (index >= 0), index, jnp.where(is_invalid, 0, -1))
        return RaggedQueries(
            repaired[:-1], jnp.where(is_invalid_row, -1, lengths), sequence, longest
        )

    def padded(self, x: jax.Array) -> jax.Array:
        """[tokens, ...] as [B, longest, ...]; padding is unspecified."""
        places = self.starts[:, None] + jnp.arange(self.longest, dtype=jnp.int32)[None]
        if not x.shape[0]:  # there is nothing to take
            return jnp.zeros((*places.shape, *x.shape[1:]), x.dtype)
        return jnp.take(x, places, axis=0, mode="clip")

    def packed(self, x: jax.Array, padding: float) -> jax.Array:
        """[B, longest, ...] as [tokens, ...], with `padding` for tokens of no sequence."""
        sequence = jnp.maximum(self.sequence, 0)
        tokens = jnp.arange(self.sequence.shape[0], dtype=jnp.int32)
        within = jnp.clip(tokens - self.starts[sequence], 0, self.longest - 1)
        found = x[sequence, within]
        has_sequence = (self.sequence >= 0).reshape(-1, *(1,) * (found.ndim - 1))
        return jnp.where(has_sequence, found, jnp.asarray(padding, x.dtype))
