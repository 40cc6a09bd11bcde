"""A decoder of the llama architecture in plain JAX, whose attention is `attn_dispatch`.

Letters in the shapes: B batch, T query positions, S key positions, L layers, N query heads,
K key/value heads (N % K == 0), H head dimension, D model width, F feed-forward width,
V vocabulary size. Activations have the dtype of the weights; norms, rotary angles and logits
are float32 whatever that dtype is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import attn_dispatch
from attn_dispatch.implementation import ImplementationName

# {"embed": [V, D], "output": [D, V] (absent when tied), "output_norm": [D],
#  "layers": {name: [L, ...]}}, see gguf_weights.py.
Params = dict[str, Any]


class InputError(ValueError):
    """The example cannot do what its input asks for; the message says what to do instead."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and constants of one model; hashable, so it can be a static jit argument."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    ffn_width: int
    vocab: int
    context: int
    rope_base: float
    norm_eps: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier positions, both [L, B, S, K, H]."""

    key: jax.Array
    value: jax.Array

    def padded_to(self, size: int) -> "Cache":
        """The same cache with room for `size` positions."""
        pad = [(0, 0), (0, 0), (0, size - self.key.shape[2]), (0, 0), (0, 0)]
        return Cache(jnp.pad(self.key, pad), jnp.pad(self.value, pad))


def forward(
    params: Params,
    tokens: jax.Array,
    config: Config,
    *,
    implementation: ImplementationName | None = None,
) -> tuple[jax.Array, Cache]:
    """All logits [B, T, V] of tokens [B, T], and their keys and values [L, B, T, K, H]."""
    rotary = rotary_angles(jnp.arange(tokens.shape[1])[None], config)

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, Cache]:
        query, key, value = project(x, weights, rotary, config)
        # Plain causal attention, nothing else: every implementation can run this call.
        attended = attn_dispatch.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        return finish(x, attended, weights, config), Cache(key, value)

    x, cache = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return logits_of(x, params, config), cache


def decode_step(
    params: Params,
    cache: Cache,
    token: jax.Array,
    lengths: jax.Array,
    config: Config,
    attention: Callable[..., jax.Array] = attn_dispatch.dot_product_attention,
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after one more token [B] per row, and the cache [L, B, S, K, H] with it.

    Args:
      lengths: the number of positions of each row in the cache, [B]. The cache may hold anything
        past them.
      attention: a function like `attn_dispatch.dot_product_attention`.
    """
    rotary = rotary_angles(lengths[:, None], config)
    rows = jnp.arange(token.shape[0])

    def layer(x: jax.Array, scanned: tuple[Params, Cache]) -> tuple[jax.Array, Cache]:
        weights, old = scanned
        query, key, value = project(x, weights, rotary, config)  # [B, 1, N or K, H]
        new = Cache(
            old.key.at[rows, lengths].set(key[:, 0]), old.value.at[rows, lengths].set(value[:, 0])
        )
        # With lengths, shapes stay the same while the cache fills. No implementation is named,
        # because some do not accept lengths; the library warns if it falls back to XLA.
        attended = attention(query, new.key, new.value, key_value_seq_lengths=lengths + 1)
        return finish(x, attended, weights, config), new

    x, cache = jax.lax.scan(layer, params["embed"][token[:, None]], (params["layers"], cache))
    return logits_of(x, params, config)[:, 0], cache


def project(
    x: jax.Array, weights: Params, rotary: tuple[jax.Array, jax.Array], config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rotated query [B, T, N, H] and key [B, T, K, H], and the value [B, T, K, H]."""
    x = _rms_norm(x, weights["attn_norm"], config)
    columns, kv_columns = config.heads * config.head_dim, config.kv_heads * config.head_dim
    query, key, value = (
        y.reshape(*x.shape[:2], -1, config.head_dim)
        for y in _products(x, weights, attn_q=columns, attn_k=kv_columns, attn_v=kv_columns)
    )
    return _rotate(query, rotary), _rotate(key, rotary), value


def finish(x: jax.Array, attended: jax.Array, weights: Params, config: Config) -> jax.Array:
    """The rest of a layer after its attention [B, T, N, H]: output projection and SwiGLU."""
    x = x + attended.reshape(*x.shape[:2], -1) @ weights["attn_output"]
    y = _rms_norm(x, weights["ffn_norm"], config)
    gate, up = _products(y, weights, ffn_gate=config.ffn_width, ffn_up=config.ffn_width)
    return x + (jax.nn.silu(gate) * up) @ weights["ffn_down"]


def by_layer(params: Params) -> Params:
    """The same weights as a tuple of one dictionary per layer, for unrolled layers.

    Weights that multiply the same array are joined side by side: one product is faster than three.
    """

    def layer_weights(number: int) -> Params:
        weights = {name: x[number] for name, x in params["layers"].items()}
        for names in _JOINED:
            weights[" ".join(names)] = jnp.concatenate([weights.pop(x) for x in names], axis=-1)
        return weights

    layers = params["layers"]["attn_norm"].shape[0]
    return params | {"layers": tuple(layer_weights(i) for i in range(layers))}


_JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))


def _products(x: jax.Array, weights: Params, **columns: int) -> list[jax.Array]:
    """x multiplied by joined weights, and the product split again into these numbers of columns."""
    joined = weights.get(" ".join(columns))
    if joined is None:
        return [x @ weights[name] for name in columns]
    starts = [sum([*columns.values()][:i]) for i in range(1, len(columns))]
    return jnp.split(x @ joined, starts, axis=-1)


def logits_of(x: jax.Array, params: Params, config: Config) -> jax.Array:
    """float32 logits [B, T, V] of the last layer's x [B, T, D]."""
    x = _rms_norm(x, params["output_norm"], config)
    output = params["output"] if "output" in params else params["embed"].T
    return jnp.matmul(x, output, preferred_element_type=jnp.float32)


def _rms_norm(x: jax.Array, gain: jax.Array, config: Config) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + config.norm_eps)
    return (normed * gain.astype(jnp.float32)).astype(x.dtype)


def rotary_angles(positions: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B or 1, T, 1, H / 2] of the rotary angles at `positions` [B or 1, T]."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions[:, :, None, None] * config.rope_base**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, N, H] with each pair of neighbours (2i, 2i + 1) of H turned by its angle.

    In GGUF files of llama models, the query and key weights are ordered such that the two numbers
    of a rotary pair are neighbours, not in two halves. The order within H is the same for query and
    key, so their product does not depend on it.
    """
    cos, sin = rotary
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
