"""Training steps of public models: the list equals the kernels lowered for an H100."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from examples.smollm2 import model as smollm2
from examples.smollm2.random_weights import SMOLLM2_135M, drawn
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention, explain_program
from attn_dispatch.typed_jax import is_tracer
from attn_dispatch.whole_programs.places import Place
from tests.support import integration_layers
from tests.support.backend import needs_cudnn
from tests.support.integration_layers import LAYERS
from tests.support.integration_layers import X as LAYER_X
from tests.support.program_lists import checked, struct

pytestmark = needs_cudnn

B, T, N, H = 2, 128, 4, 64  # all models share two plans of cuDNN
D = N * H
X = struct(B, T, D)


def mean(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).mean()


def runs(found: Any) -> tuple[Any, Any]:
    (call,) = found.calls
    return call.forward_runs.times, call.backward_runs.times


def place(found: Any) -> Place:
    (call,) = found.calls
    assert call.place is not None
    return call.place


def test_smollm2_in_plain_jax_is_listed_with_its_kernels():
    """SmolLM2's layers are a scan."""
    config = dataclasses.replace(
        SMOLLM2_135M, layers=3, heads=N, kv_heads=N, head_dim=H, width=D, vocab=64, ffn_width=32
    )
    params = jax.eval_shape(partial(drawn, config, "bfloat16"))

    def loss(params: Any, tokens: Any) -> jax.Array:
        return mean(jax.nn.log_softmax(smollm2.forward(params, tokens, config)[0])[..., 0])

    found = checked(jax.jit(jax.value_and_grad(loss)), params, struct(B, T, dtype="int32"))
    assert runs(found) == (3, 3) and found.others == ()
    assert place(found).file == smollm2.__file__


@pytest.mark.parametrize("remat", ["none", "context"])
def test_the_nnx_decoder_of_train_packed_is_listed_with_its_kernels(remat: str):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    from examples.train_packed.model import Config
    from examples.train_packed.packing import Rows
    from examples.train_packed.step import Trainer

    config = Config(3, D, N, N, H, 32, 64, dtype="bfloat16", remat=remat)
    trainer = Trainer.new(config, 1e-3, 10)
    state = jax.eval_shape(lambda: trainer.initial(config, 0))
    rows = Rows(**{x.name: struct(B, T, dtype="int32") for x in dataclasses.fields(Rows)})
    found = checked(trainer.step(4, None), state, rows)
    assert runs(found) == (3, 3)
    assert found.others == () and "model.py" in str(found.calls[0].place)


def test_a_training_step_that_updates_a_module_in_place():
    """The gradients of NNX's training steps are in no result of the function."""
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    from attn_dispatch.integrations.flax import attention_fn

    more: dict[str, Any] = {"attention_fn": attention_fn, "dtype": jnp.bfloat16, "decode": False}
    model = nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **more)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: mean(model(x)))(model)
        optimizer.update(model, gradients)
        return loss

    found = explain_program(step, model, optimizer, X, target="h100")
    assert runs(found) == (1, 1) and found.fallbacks == ()
    before = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(x, jax.Array) and not is_tracer(x) for x in before)


def test_a_transformer_in_flax_linen_is_listed_with_its_kernels():
    linen = pytest.importorskip("flax.linen")
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
    found = checked(jax.grad(lambda params, x: mean(model.apply(params, x))), params, X)
    # remat runs each forward pass again; nothing uses the first of the last layer.
    assert runs(found) == (3, 2) and found.others == ()
    assert place(found).file == __file__
    assert place(found).layer == "flax's MultiHeadDotProductAttention.__call__"


def test_a_transformer_in_equinox_is_listed_with_its_kernels():
    eqx = pytest.importorskip("equinox")
    from attn_dispatch.integrations.equinox import replace_attention

    layers = replace_attention(
        [eqx.nn.MultiheadAttention(N, D, key=jax.random.key(i)) for i in range(2)]
    )
    layers = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_array(x) else x, layers)

    def loss(layers: Any, x: Any) -> jax.Array:
        for layer in layers:
            x = x + jax.vmap(partial(layer, is_causal=True))(x, x, x)
        return mean(x)

    found = checked(eqx.filter_jit(eqx.filter_grad(loss)), layers, X)
    assert runs(found) == (2, 2) and found.others == ()
    assert place(found).function.endswith("loss")


def test_a_transformer_in_keras_is_listed_with_its_kernels():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend here")
    from attn_dispatch.integrations.keras import patch_keras

    x = y = keras.Input((T, D), dtype="bfloat16")
    for _ in range(2):
        attention = keras.layers.MultiHeadAttention(N, H, dtype="bfloat16")
        y = y + attention(y, y, use_causal_mask=True)
    model = keras.Model(x, y)
    weights = [v.value for v in model.trainable_variables]

    def loss(weights: Any, x: Any) -> jax.Array:
        return mean(model.stateless_call(weights, [], x)[0])

    with patch_keras():
        found = checked(jax.grad(loss), weights, X)
    assert runs(found) == (2, 2) and found.others == ()
    assert place(found).layer == "keras's MultiHeadAttention._compute_attention"


def test_smollm2_on_a_mesh_is_listed_with_its_kernels():
    """The rows are split along "data" by a shard_map."""
    config = dataclasses.replace(
        SMOLLM2_135M, layers=2, heads=N, kv_heads=N, head_dim=H, width=D, vocab=64, ffn_width=32
    )
    params = jax.eval_shape(partial(drawn, config, "bfloat16"))

    def loss(params: Any, tokens: Any) -> jax.Array:
        return jax.lax.pmean(mean(smollm2.forward(params, tokens, config)[0]), "data")

    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    found = checked(step, params, struct(4 * B, T, dtype="int32"))
    assert runs(found) == (2, 2)
    assert found.calls[0].explanation.call.shape("query") == (B, T, N, H)
    assert found.calls[0].share == "one device's part, in a shard_map over 'data' (4)"


def test_explicit_axes_split_a_call():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "model"))
    q = struct(4 * B, T, 2 * N, H, sharding=sharding)

    def loss(q: Any) -> jax.Array:
        return dot_product_attention(q, q, q, is_causal=True).astype(jnp.float32).sum()

    found = checked(jax.grad(loss), q)
    assert runs(found) == (1, 1)
    assert found.calls[0].explanation.call.shape("query") == (B, T, N, H)
    assert found.calls[0].share == "one device's part, split along 'data' (4), 'model' (2)"


def test_a_program_that_cannot_be_lowered_here_is_listed_whole():
    only_elsewhere = Primitive("only_elsewhere")
    only_elsewhere.def_abstract_eval(lambda x: x)
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    q = struct(B, T, N, H, sharding=NamedSharding(mesh, P(None, None, "model")))

    def program(q: Any) -> Any:
        return dot_product_attention(q, q, only_elsewhere.bind(q), is_causal=True)

    (call,) = explain_program(program, q, target="h100").calls
    assert call.share == "all of it: how XLA splits it is not known"
    assert call.explanation.call.shape("query") == q.shape

    # Two reshapes leave a part of "data" on each of two dims.
    def in_parts(q: Any) -> Any:
        q = q.reshape(2, 2, T, N, H)
        return dot_product_attention(q, q, q, is_causal=True)

    q = struct(4, T, N, H, sharding=NamedSharding(mesh, P("data")))
    (call,) = explain_program(in_parts, q, target="h100").calls
    assert call.share == "all of it: how XLA splits it is not known"


@pytest.mark.parametrize(
    ("name", "through", "what"),
    [
        ("Flax NNX", "flax's MultiHeadAttention.__call__", "jax.nn"),
        ("Flax Linen", "flax's MultiHeadDotProductAttention.__call__", "attention by matrix"),
        ("Equinox", "equinox's MultiheadAttention.__call__", "attention by matrix products"),
        ("Keras 3", "keras's MultiHeadAttention._compute_attention", "jax.nn"),
    ],
)
def test_attention_of_each_framework_is_found(name: str, through: str, what: str):
    pytest.importorskip(LAYERS[name].package)
    params, theirs, ours = LAYERS[name].make()
    found = explain_program(jax.grad(lambda *x: theirs(*x).sum()), params, LAYER_X, target="h100")
    (other,) = found.others
    assert found.calls == () and other.what.startswith(what)
    assert other.place is not None and other.place.layer == through
    assert other.place.file == integration_layers.__file__
    found = explain_program(jax.grad(lambda *x: ours(*x).sum()), params, LAYER_X, target="h100")
    assert len(found.calls) == 1 and found.others == ()
