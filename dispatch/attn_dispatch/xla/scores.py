"""Scores of a chunk of query rows against all keys, and the products taken with them.

Arrays are heads-first: rows are [B, N, R, ·] and keys [B, K, S, ·], R being the query rows of the
chunk. The G = N // K query heads that share a key head become further rows of its one matrix
product, so K and V are never repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.semantics.masks import allowed, take_rows
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.xla.dropout import dropout_keep_mask, dropout_row_keys


def heads_first(x: jax.Array) -> jax.Array:
    """[B, T, N, ·] to [B, N, T, ·], and back."""
    return x.swapaxes(1, 2)


@dataclass(frozen=True)
class Scores:
    """What every chunk of one call shares."""

    spec: AttentionSpec
    operands: Mapping[str, jax.Array]
    positions: Positions
    row_keys: jax.Array | None
    """Those of dropout; None without it."""
    wide: jnp.dtype
    """Of scores, probabilities and sums."""
    narrow: jnp.dtype
    """Of what goes into matrix products."""

    @staticmethod
    def of(spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]) -> Scores:
        wide = jnp.dtype(spec.lse_dtype)
        # XLA's CPU matrix products in 16 bits are slow, and in float16 wrong under jit.
        narrow = wide if device.platform == "cpu" else jnp.dtype(spec.dtype)
        row_keys = dropout_row_keys(spec, operands)
        return Scores(spec, operands, Positions.of(spec, operands), row_keys, wide, narrow)

    def keys(self, name: str) -> jax.Array:
        """Key or value, [B, K, S, ·] narrow; 0 in padding, because 0 · NaN would be NaN."""
        x = self.operands[name]
        ids = self.positions.key_ids
        if ids is not None:
            x = jnp.where(ids[:, :, None, None] > 0, x, 0)
        return heads_first(x).astype(self.narrow)

    def sinks(self) -> jax.Array | None:
        """The sinks, wide [1|B, N, 1], if there are any."""
        if not self.spec.has("sinks"):
            return None
        return self.operands["sinks"].astype(self.wide)[:, :, None]

    def masked(
        self, q: jax.Array, k: jax.Array, start: jax.Array | int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Scores of the rows q from `start` on, wide [B, N, R, S], -inf where not allowed.

        The second result is d score / d (scale · q · k), None without a soft cap.
        """
        spec, size = self.spec, q.shape[2]
        positions = self.positions.rows(start, size)
        cap, cap_slope = spec.options.logits_soft_cap, None
        score = spec.options.scale * self.dot(q, k)
        if cap is not None:
            bent = jnp.tanh(score / cap)
            score, cap_slope = cap * bent, 1 - bent * bent
        if spec.has("bias"):
            score = score + take_rows(self.operands["bias"], start, size).astype(self.wide)
        if spec.has("alibi_slopes"):
            slopes = self.operands["alibi_slopes"].astype(self.wide)[:, :, None, None]
            score = score - slopes * positions.distance()
        may_attend = allowed(spec, self.operands, positions, start, size)
        if may_attend is not None:
            score = jnp.where(may_attend, score, -jnp.inf)
        return score, cap_slope

    def drop(self, x: jax.Array, start: jax.Array | int) -> jax.Array:
        """Dropout on x, [B, N, R, S]: kept and divided by 1 - rate, or 0."""
        if self.row_keys is None:
            return x
        return jnp.where(self.kept(start, x.shape[2]), x / (1 - self.spec.options.dropout_rate), 0)

    def kept(self, start: jax.Array | int, size: int) -> jax.Array:
        """Whether dropout keeps each pair of the query rows from `start` on, bool [B, N, R, S]."""
        spec = self.spec
        if self.row_keys is None:
            return jnp.ones((spec.batch, spec.num_heads, size, spec.seq_len_kv), bool)
        return dropout_keep_mask(spec, self.row_keys, start, size)

    def dot(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """[B, N, R, H] · [B, K, S, H], summed over H: wide [B, N, R, S]."""
        product = self._einsum("bkrh,bksh->bkrs", self._fold(rows), keys)
        return product.reshape(*rows.shape[:3], keys.shape[2])

    def sum_over_keys(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """[B, N, R, S] · [B, K, S, H], summed over S: wide [B, N, R, H]."""
        product = self._einsum("bkrs,bksh->bkrh", self._fold(weights), keys)
        return product.reshape(*weights.shape[:3], keys.shape[3])

    def sum_over_rows(self, weights: jax.Array, rows: jax.Array) -> jax.Array:
        """[B, N, R, S] · [B, N, R, H], summed over R and G: wide [B, K, S, H]."""
        return self._einsum("bkrs,bkrh->bksh", self._fold(weights), self._fold(rows))

    def _fold(self, rows: jax.Array) -> jax.Array:
        """[B, N, R, ·] to [B, K, G · R, ·]."""
        b, n, size, last = rows.shape
        return rows.reshape(b, self.spec.num_kv_heads, n // self.spec.num_kv_heads * size, last)

    def _einsum(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        # No precision is named: jax.default_matmul_precision is the caller's to choose.
        x, y = x.astype(self.narrow), y.astype(self.narrow)
        return jnp.einsum(subscripts, x, y, preferred_element_type=self.wide)
