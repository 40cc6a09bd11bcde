"""Training steps of models, for tests of whole programs; `PROGRAMS` has each by its name.

A program is made where it is used, because it may need a framework.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
from examples.smollm2 import model as smollm2
from examples.smollm2.random_weights import SMOLLM2_135M, drawn
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention
from tests.support.program_lists import struct

B, T, N, H = 2, 128, 4, 64  # all models share two plans of cuDNN
D = N * H
X = struct(B, T, D)


@dataclasses.dataclass(frozen=True)
class ModelProgram:
    """A training step, and how often its attention runs."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    forward: int
    backward: int


def mean(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).mean()


def smollm2_in_plain_jax() -> ModelProgram:
    """SmolLM2's layers are a scan."""
    params, loss = _smollm2(3)
    return ModelProgram(jax.jit(jax.value_and_grad(loss)), (params, _tokens(B)), 3, 3)


def _tokens(batch: int) -> jax.ShapeDtypeStruct:
    return struct(batch, T, dtype="int32")


def _smollm2(layers: int) -> tuple[Any, Callable[..., jax.Array]]:
    config = dataclasses.replace(
        SMOLLM2_135M,
        layers=layers,
        heads=N,
        kv_heads=N,
        head_dim=H,
        width=D,
        vocab=64,
        ffn_width=32,
    )

    def loss(params: Any, tokens: Any) -> jax.Array:
        return mean(jax.nn.log_softmax(smollm2.forward(params, tokens, config)[0])[..., 0])

    return jax.eval_shape(partial(drawn, config, "bfloat16")), loss


def smollm2_in_a_shard_map(mesh: Mesh | AbstractMesh) -> ModelProgram:
    """The rows are split along "data"."""
    params, loss = _smollm2(2)

    def of_all(params: Any, tokens: Any) -> jax.Array:
        return jax.lax.pmean(loss(params, tokens), "data")

    step = jax.grad(jax.shard_map(of_all, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    return ModelProgram(step, (params, _tokens(mesh.size * B)), 2, 2)


def in_a_scan_under_remat(batch_sharding: NamedSharding | None = None) -> ModelProgram:
    """Every layer is computed again in the backward pass."""

    def layer(x: Any, weights: Any) -> Any:
        q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights["qkv"])
        out = dot_product_attention(q, k, v, is_causal=True)
        return x + jnp.einsum("btnh,nhd->btd", out, weights["out"]), None

    def loss(params: Any, x: Any) -> jax.Array:
        return mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    params = {"qkv": struct(5, 3, D, N, H), "out": struct(5, N, H, D)}
    batch = B * (batch_sharding.mesh.size if batch_sharding else 1)
    x = struct(batch, T, D, sharding=batch_sharding)
    return ModelProgram(jax.grad(loss), (params, x), 10, 5)


def on_a_mesh(mesh: Mesh | AbstractMesh) -> ModelProgram:
    """XLA splits the rows along "data"."""
    return in_a_scan_under_remat(NamedSharding(mesh, P("data")))


def train_packed(remat: str = "context") -> ModelProgram:
    """A decoder in Flax NNX: a scan under remat over rows of packed documents."""
    from examples.train_packed.model import Config
    from examples.train_packed.packing import Rows
    from examples.train_packed.step import Trainer

    config = Config(3, D, N, N, H, 32, 64, dtype="bfloat16", remat=remat)
    trainer = Trainer.new(config, 1e-3, 10)
    state = jax.eval_shape(lambda: trainer.initial(config, 0))
    rows = Rows(**{x.name: _tokens(B) for x in dataclasses.fields(Rows)})
    return ModelProgram(trainer.step(4, None), (state, rows), 3, 3)


def in_flax_linen() -> ModelProgram:
    """Each layer is under remat."""
    from flax import linen

    from attn_dispatch.integrations.flax import attention_fn

    attention = partial(attention_fn, is_causal=True)

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(
                N, dtype=jnp.bfloat16, attention_fn=attention
            )(y)
            return x + linen.Dense(D)(linen.gelu(linen.Dense(32)(linen.LayerNorm()(x))))

    class Transformer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = linen.remat(Block)()(x)
            return x

    model = Transformer()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    step = jax.grad(lambda params, x: mean(model.apply(params, x)))
    # remat runs each forward pass again; nothing uses the first of the last layer.
    return ModelProgram(step, (params, X), 3, 2)


def in_equinox() -> ModelProgram:
    import equinox as eqx

    from attn_dispatch.integrations.equinox import replace_attention

    layers = replace_attention(
        [eqx.nn.MultiheadAttention(N, D, key=jax.random.key(i)) for i in range(2)]
    )
    layers = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_array(x) else x, layers)

    def loss(layers: Any, x: Any) -> jax.Array:
        for layer in layers:
            x = x + jax.vmap(partial(layer, is_causal=True))(x, x, x)
        return mean(x)

    return ModelProgram(eqx.filter_jit(eqx.filter_grad(loss)), (layers, X), 2, 2)


def in_keras() -> ModelProgram:
    import keras

    from attn_dispatch.integrations.keras import patch_keras

    x = y = keras.Input((T, D), dtype="bfloat16")
    for _ in range(2):
        attention = keras.layers.MultiHeadAttention(N, H, dtype="bfloat16")
        y = y + attention(y, y, use_causal_mask=True)
    model = keras.Model(x, y)
    weights = [v.value for v in model.trainable_variables]

    def loss(weights: Any, x: Any) -> jax.Array:
        with patch_keras():
            return mean(model.stateless_call(weights, [], x)[0])

    return ModelProgram(jax.grad(loss), (weights, X), 2, 2)


@dataclasses.dataclass(frozen=True)
class Maker:
    """How a program is made, and the packages that it needs."""

    make: Callable[..., ModelProgram]
    packages: tuple[str, ...] = ()
    is_on_mesh: bool = False
    """Whether `make` takes a mesh with the axis "data"."""


PROGRAMS = {
    "SmolLM2 in plain JAX": Maker(smollm2_in_plain_jax),
    "a scan under remat in plain JAX": Maker(in_a_scan_under_remat),
    "SmolLM2 in a shard_map": Maker(smollm2_in_a_shard_map, is_on_mesh=True),
    "a scan under remat on a mesh": Maker(on_a_mesh, is_on_mesh=True),
    "a decoder in Flax NNX": Maker(train_packed, ("flax", "optax")),
    "a transformer in Flax Linen": Maker(in_flax_linen, ("flax",)),
    "a transformer in Equinox": Maker(in_equinox, ("equinox",)),
    "a transformer in Keras": Maker(in_keras, ("keras",)),
}
