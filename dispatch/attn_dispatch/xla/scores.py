"""Scores of one block of a call, and the matrix products with them.

Arrays have heads first: rows are [B, N, R, ·] and keys [B, K, S, ·]. B, N and K count the block's
batch rows and heads, and R its query rows. The G = N // K query heads that share a kv head become
further rows of one matrix product, so key and value are never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import is_mod_operand, mod_operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.mods import modified
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.typed_jax import vjp
from attn_dispatch.xla.blocks import Block, BlockSizes
from attn_dispatch.xla.dropout import dropout_head_keys, dropout_keep_mask

_AXES = {
    "key": "bsk",
    "value": "bsk",
    "mask": "bnt",
    "window": "b",
    "causal_offset": "b",
    "bias": "bnt",
    "alibi_slopes": "bn",
    "sinks": "bn",
    "keep": "bnt",
}
"""The leading axes of the operands that scores depend on."""


ScoreGradient = Callable[[jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
"""The backward function of `Scores.masked`. It takes the gradient of the softmax's input, which is
0 where a pair may not attend, and returns the gradient of scale · q · k, and by name the gradients
of the arrays that score_mod reads."""


def heads_first(x: jax.Array) -> jax.Array:
    """[B, T, N, ·] to [B, N, T, ·], and back."""
    return x.swapaxes(1, 2)


@dataclass(frozen=True)
class BlockedCall:
    """A call that is computed in blocks: what all of its blocks share."""

    spec: AttentionSpec
    operands: Mapping[str, jax.Array]
    positions: Positions
    sizes: BlockSizes
    head_keys: jax.Array | None
    """The keys of dropout's masks; None without dropout."""
    whole_keys: tuple[jax.Array, jax.Array] | None
    """Key and value as `Scores` has them, made once; None if each block takes a part of them."""
    wide: jnp.dtype
    """The dtype of scores, probabilities and sums."""
    narrow: jnp.dtype
    """The dtype of operands of matrix products."""

    @staticmethod
    def of(spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]) -> BlockedCall:
        wide = jnp.dtype(spec.lse_dtype)
        # On the CPU, XLA's 16-bit matrix products are slow, and wrong for float16 under jit.
        narrow = wide if device.platform == "cpu" else jnp.dtype(spec.dtype)
        positions, sizes = Positions.of(spec, operands), BlockSizes.of(spec)
        whole_keys = None
        if sizes.parts(spec) == (1, 1):
            whole_keys = _keys(operands, positions, narrow)
        head_keys = dropout_head_keys(spec, operands)
        return BlockedCall(spec, operands, positions, sizes, head_keys, whole_keys, wide, narrow)

    def scores(self, block: Block) -> Scores:
        """The scores of one block."""
        operands = {
            name: block.take(self.operands[name], axes)
            for name, axes in _AXES.items()
            if self.spec.has(name)
        }
        operands |= {x: y for x, y in self.operands.items() if is_mod_operand(x)}
        positions = self.positions.part(block.take)
        keys = self.whole_keys or _keys(operands, positions, self.narrow)
        head_keys = None if self.head_keys is None else block.take(self.head_keys, "bn")
        return Scores(self, block, operands, positions, head_keys, *keys)


def _keys(
    operands: Mapping[str, jax.Array], positions: Positions, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Key and value, [B, K, S, ·]; 0 in padding, because 0 · NaN would be NaN."""
    ids = positions.key_ids

    def cleared(x: jax.Array) -> jax.Array:
        if ids is not None:
            x = jnp.where(ids[:, :, None, None] > 0, x, 0)
        return heads_first(x).astype(dtype)

    return cleared(operands["key"]), cleared(operands["value"])


@dataclass(frozen=True)
class Scores:
    """The scores of one block, with the operands cut to the block."""

    call: BlockedCall
    block: Block
    operands: Mapping[str, jax.Array]
    positions: Positions
    head_keys: jax.Array | None
    k: jax.Array
    """Narrow [B, K, S, H]."""
    v: jax.Array
    """Narrow [B, K, S, V]."""

    @property
    def sinks(self) -> jax.Array | None:
        """The sinks, wide [1|B, N, 1], if there are any."""
        if "sinks" not in self.operands:
            return None
        return self.operands["sinks"].astype(self.call.wide)[:, :, None]

    def masked(
        self, q: jax.Array, *, is_differentiated: bool = False
    ) -> tuple[jax.Array, ScoreGradient]:
        """Scores of the rows q, wide [B, N, R, S], -inf where masked, and their backward function.

        With `is_differentiated` JAX may also differentiate the scores.
        """
        spec, wide = self.call.spec, self.call.wide
        may_attend = allowed(spec, self.operands, self.positions)
        safe = may_attend if is_differentiated else None
        score, pull = self._modified(self._scaled_dot(q), may_attend, safe)
        if "bias" in self.operands:
            score = score + self.operands["bias"].astype(wide)
        if "alibi_slopes" in self.operands:
            slopes = self.operands["alibi_slopes"].astype(wide)[:, :, None, None]
            score = score - slopes * self.positions.distance().astype(wide)
        if may_attend is not None:
            score = jnp.where(may_attend, score, -jnp.inf)
        return score, pull

    def _modified(
        self, score: jax.Array, may_attend: jax.Array | None, safe: jax.Array | None
    ) -> tuple[jax.Array, ScoreGradient]:
        """Scores after the soft cap and score_mod, and their backward function."""
        options, factor = self.call.spec.options, None
        cap, program = options.meaning.logits_soft_cap, options.meaning.score_mod
        if cap is not None:
            tanh = jnp.tanh(score / cap)
            score, factor = cap * tanh, 1 - tanh * tanh

        def through_cap(grad: jax.Array) -> jax.Array:
            return grad if factor is None else grad * factor

        if program is None:
            return score, lambda grad: (through_cap(grad), {})
        assert self.positions.indices is not None
        indices = self.positions.indices
        names = mod_operands("score_mod", len(program.arrays))
        arrays = {name: self.operands[name] for name in names}
        moving = {x: y for x, y in arrays.items() if jnp.issubdtype(y.dtype, jnp.floating)}
        is_learned = any(map(is_mod_operand, options.wanted.gradients))

        def function(
            score: jax.Array, moving: dict[str, jax.Array], safe: jax.Array | None
        ) -> jax.Array:
            read = tuple((arrays | moving).values())
            return modified(program, score, indices, read, safe, is_learned=is_learned)

        def pull(grad: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            def masked(score: jax.Array, moving: dict[str, jax.Array]) -> jax.Array:
                return function(score, moving, may_attend)

            score_grad, read = vjp(masked, score, moving)[1](grad)
            return through_cap(score_grad), read

        return function(score, moving, safe), pull

    def _scaled_dot(self, q: jax.Array) -> jax.Array:
        scale = self.call.spec.meaning.scale
        if self.call.wide != self.call.narrow:
            return scale * self.dot(q, self.k)
        # XLA could fuse a product with the result into later operations, and round the score
        # differently there than for its row's maximum: exp of the difference could overflow.
        return self.dot(scale * q.astype(self.call.wide), self.k)

    def drop(self, x: jax.Array) -> jax.Array:
        """Dropout on x [B, N, R, S]: x / (1 - rate) where kept, else 0."""
        if self.head_keys is None and "keep" not in self.operands:
            return x
        return jnp.where(self.kept, x / (1 - self.call.spec.meaning.dropout_rate), 0)

    @cached_property
    def kept(self) -> jax.Array:
        """Whether dropout keeps each pair, bool [B, N, R, S].

        The mask is cached, because XLA would draw it again for each use.
        """
        spec, sizes = self.call.spec, self.block.sizes
        if "keep" in self.operands:
            return self.operands["keep"]
        if self.head_keys is None:
            return jnp.ones((sizes["b"], sizes["n"], sizes["t"], spec.seq_len_kv), bool)
        return dropout_keep_mask(spec, self.head_keys, self.block.starts["t"], sizes["t"])

    def dot(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """[B, N, R, H] · [B, K, S, H] summed over H: wide [B, N, R, S]."""
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
        k = self.block.sizes["k"]
        return rows.reshape(b, k, n // k * size, last)

    def _einsum(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        # No precision is set: the caller may choose one with jax.default_matmul_precision.
        x, y = x.astype(self.call.narrow), y.astype(self.call.narrow)
        return jnp.einsum(subscripts, x, y, preferred_element_type=self.call.wide)
