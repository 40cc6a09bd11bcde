"""A decoder with grouped queries in Flax NNX, the same for packed and padded rows.

Letters in the shapes: B rows, T positions, N query heads, K key/value heads, H head dim, D width.
Parameters are float32; activations have the dtype of the configuration.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attn_dispatch import dot_product_attention

from .packing import Rows

REMAT = {
    "none": None,
    "context": jax.checkpoint_policies.save_only_these_names("context"),
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("context"),
    ),
}
"""By the value of --remat, the policy for what a layer saves for its backward pass: everything, the
attention, or the attention and the matrix products. The rest is computed again: docs/packing.md."""


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocabulary: int
    dtype: str = "float32"
    remat: str = "context"
    rope_base: float = 10000.0


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        dtype = jnp.dtype(c.dtype)

        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> Layer:
            return Layer(c, rngs)

        self.embed = nnx.Embed(c.vocabulary, c.width, dtype=dtype, rngs=rngs)
        self.layers = layers(rngs)
        self.norm = nnx.RMSNorm(c.width, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(c.width, c.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, rows: Rows, max_segments: int) -> jax.Array:
        """float32 logits [B, T, vocabulary]; no row has more than `max_segments` documents."""
        rotary = rotary_angles(rows.positions, self.config)

        def run(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x, rotary, rows.segment_ids, max_segments)

        if self.config.remat != "none":
            run = nnx.remat(run, policy=REMAT[self.config.remat])
        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            self.embed(rows.tokens), self.layers
        )
        return self.output(self.norm(x)).astype(jnp.float32)


class Layer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        self.q = self._matrix(c.width, c.heads * c.head_dim, rngs)
        self.k = self._matrix(c.width, c.kv_heads * c.head_dim, rngs)
        self.v = self._matrix(c.width, c.kv_heads * c.head_dim, rngs)
        self.o = self._matrix(c.heads * c.head_dim, c.width, rngs)
        self.gate = self._matrix(c.width, c.ffn_width, rngs)
        self.up = self._matrix(c.width, c.ffn_width, rngs)
        self.down = self._matrix(c.ffn_width, c.width, rngs)
        self.attention_norm = nnx.RMSNorm(c.width, dtype=jnp.dtype(c.dtype), rngs=rngs)
        self.ffn_norm = nnx.RMSNorm(c.width, dtype=jnp.dtype(c.dtype), rngs=rngs)

    def _matrix(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
        dtype = jnp.dtype(self.config.dtype)
        return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, rotary: Any, segment_ids: jax.Array, max_segments: int
    ) -> jax.Array:
        """The output of the layer, [B, T, D] like x."""
        c = self.config
        y = self.attention_norm(x)
        q, k, v = (
            project(y).reshape(*x.shape[:2], heads, c.head_dim)
            for project, heads in ((self.q, c.heads), (self.k, c.kv_heads), (self.v, c.kv_heads))
        )
        attended = dot_product_attention(
            turned(q, rotary), turned(k, rotary), v, is_causal=True, query_segment_ids=segment_ids,
            max_segments=max_segments,
        )  # fmt: skip
        x = x + self.o(attended.reshape(*x.shape[:2], -1))
        y = self.ffn_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def rotary_angles(positions: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, H / 2] at `positions` [B, T]."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions[:, :, None, None] * config.rope_base**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def turned(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, N, H] with each pair (i, i + H / 2) turned by its angle."""
    cos, sin = rotary
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
